"""What the kernel log says about GPUs and their switches: records and patterns, each under a real line. Pure.

A record of /dev/kmsg is `prio,seq,time,flags;text`, and lines of properties that begin with a blank (the kernel's
Documentation/ABI/testing/dev-kmsg). The facility is prio / 8. What user space writes has another one than the kernel's,
0, and is heard only with the mark of a fault: everybody who may write there could otherwise evict a replica.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_RECORD = 8192  # the kernel's own bound, PRINTK_MESSAGE_MAX and its properties, is below
FELL_OFF = 79

# 6,1234,5678901,-;NVRM: Xid (PCI:0000:04:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_RECORD = re.compile(r"(\d{1,9}),(\d{1,20}),(\d{1,20}),([^;]{0,64});(.*)", re.DOTALL)
# ... (injected by ftctl fault f-1a2b3c4d)
_MARK = re.compile(r"\(injected by ftctl fault (f-[0-9a-f]{8})\)")
_PCI = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
# NVRM: Xid (PCI:0000:04:00): 79, pid=1234, name=python, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:04:00): 31, pid='<unknown>', name=<unknown>, Ch 00000008, intr 00000000. MMU Fault: ...
# NVRM: Xid (0000:03:00): 8, Channel 00000001
_XID = re.compile(rf"NVRM: Xid \({_PCI}\): (\d{{1,5}})(?:, (.*))?$")
# NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.
_UNNUMBERED = re.compile(rf"NVRM: GPU {_PCI}: GPU has fallen off the bus")
# nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 ...
_SXID = re.compile(rf"nvidia-nvswitch(\d{{1,3}}): SXid \({_PCI}\): (\d{{1,6}})(?:, (.*))?$")
# 13, pid=1234, name=python, Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0): Out Of Range Address
_UNIT = re.compile(r"\(?(GPC \d+)(?:, ?(?:PPC \d+, ?)?(TPC \d+))?(?:, ?(SM \d+))?")
# 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x000045c0 0x00000000 ...)
_SEVERITY = re.compile(r"\b(Fatal|Non-?fatal)\b", re.IGNORECASE)
# 45, pid=1234, name=python, Ch 00000010, errorString CTX SWITCH TIMEOUT, caused by previous Xid 149
_PREVIOUS = re.compile(r"(?:caused by previous|due to previous|follows) Xid (\d{1,5})", re.IGNORECASE)
# 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
_RECOVERY = re.compile(r"recovery action changed from .{0,60}? to 0x([0-9a-fA-F]{1,4})")
_PID = re.compile(r"\bpid='?(\d{1,10})")
_NAME = re.compile(r"\bname='?([^,'<]{1,64})")


@dataclass(frozen=True)
class Record:
    """`kernel`: the kernel itself wrote it. `fault`: the fault whose mark it carries."""

    kernel: bool
    seq: int
    text: str
    fault: str = ""

    @property
    def counts(self) -> bool:
        return self.kernel or bool(self.fault)


@dataclass(frozen=True)
class XidLine:
    """As in agents.health.xids.Xid; `pci` is the slot ("0000:04:00"). `numbered`: the line says the number."""

    pci: str
    code: int
    pid: int | None = None
    process: str = ""
    unit: str = ""
    fatal: bool = False
    previous: int | None = None
    recovery: int | None = None
    numbered: bool = True


@dataclass(frozen=True)
class SwitchLine:
    """`link`: "Link 30", if the line names one."""

    switch: int
    code: int
    fatal: bool
    link: str = ""


Line = XidLine | SwitchLine


def record(raw: bytes) -> Record | None:
    """None for what is no record: garbage, or half of one."""
    head, _, _properties = raw[:MAX_RECORD].partition(b"\n")
    found = _RECORD.fullmatch(head.decode("utf-8", "replace"))
    if found is None:
        return None
    mark = _MARK.search(found[5])
    return Record(int(found[1]) >> 3 == 0, int(found[2]), found[5].strip(), mark[1] if mark else "")


def line(text: str) -> Line | None:
    """None for a line that says nothing about GPUs and switches."""
    if (found := _XID.search(text)) is not None:
        return _xid(slot(found[1]), int(found[2]), found[3] or "")
    if (found := _UNNUMBERED.search(text)) is not None:
        return XidLine(slot(found[1]), FELL_OFF, numbered=False)
    if (found := _SXID.search(text)) is not None:
        rest = found[4] or ""
        link = re.search(r"\bLink \d{1,3}", rest)
        return SwitchLine(int(found[1]), int(found[3]), _fatal(rest), link[0] if link else "")
    return None


def slot(pci: str) -> str:
    """One spelling of a PCI address: "00000000:04:00.0" and "0000:04:00" are "0000:04:00"."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest.partition('.')[0]}"


def _xid(pci: str, code: int, rest: str) -> XidLine:
    pid, name, unit = _PID.search(rest), _NAME.search(rest), _UNIT.search(rest)
    previous, recovery = _PREVIOUS.search(rest), _RECOVERY.search(rest)
    return XidLine(
        pci,
        code,
        pid=int(pid[1]) if pid else None,
        process=name[1].strip() if name else "",
        unit=", ".join(part for part in unit.groups() if part) if unit else "",
        fatal=_fatal(rest),
        previous=int(previous[1]) if previous else None,
        recovery=int(recovery[1], 16) if recovery else None,
    )


def _fatal(rest: str) -> bool:
    severity = _SEVERITY.search(rest)
    return severity is not None and severity[1].lower() == "fatal"
