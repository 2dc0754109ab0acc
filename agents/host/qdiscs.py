"""Queueing disciplines (tc(8)) at the root of a network device, over rtnetlink.

The kernel gives every device a default one, with handle 0; what has another handle was put there by somebody. Ours is
made only in the place of a default, under a handle of its own, and removed by that handle; the kernel then puts its
default back by itself. What hangs beside the root (clsact, ingress) is not touched by either.
"""

from __future__ import annotations

import errno
import struct
from typing import Protocol

import msgspec

from agents.host.errors import HostError
from agents.host.rtnl import NLM_F_CREATE, NLM_F_EXCL, Rtnl, attr_map, pack_attr

RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38  # linux/rtnetlink.h
TCMSG = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info (linux/pkt_sched.h)
TC_H_ROOT = 0xFFFFFFFF
TCA_KIND, TCA_OPTIONS = 1, 2
TCA_TBF_PARMS, TCA_TBF_RATE64, TCA_TBF_BURST = 1, 4, 6
TCA_NETEM_REORDER, TCA_NETEM_CORRUPT, TCA_NETEM_LATENCY64, TCA_NETEM_JITTER64 = 3, 4, 10, 11
RATESPEC = struct.Struct("=BBHhHI")  # cell_log, linklayer, overhead, cell_align, mpu, rate
LINKLAYER_ETHERNET = 1  # the kernel then computes its own table
TBF_QOPT_TAIL = struct.Struct("=III")  # limit, buffer, mtu
NETEM_QOPT = struct.Struct("=IIIIII")  # latency, limit, loss, gap, duplicate, jitter
U32_MAX = 0xFFFFFFFF
LOOPBACK_INDEX = 1


class Qdisc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    handle: int  # 0: the kernel's own
    parent: int

    @property
    def text(self) -> str:
        return f"{self.kind} {self.handle >> 16:x}:"


class Qdiscs(Protocol):
    """All raise HostError."""

    def unsupported(self, kind: str) -> str:
        """Why this kernel has none of that kind; empty if it has."""
        ...

    def of(self, index: int) -> tuple[Qdisc, ...]: ...
    def add_root(self, index: int, handle: int, kind: str, options: bytes, operation: str) -> None: ...

    def remove_root(self, index: int, handle: int, operation: str) -> None:
        """One that is not there is no error."""
        ...


class NetlinkQdiscs:
    def __init__(self, rtnl: Rtnl | None = None) -> None:
        self._rtnl = rtnl or Rtnl()

    def unsupported(self, kind: str) -> str:
        """Asks for one at the loopback device without its options. A kernel that knows the kind loads it and refuses
        that (EINVAL), one that does not says so (ENOENT); neither changes anything."""
        body = TCMSG.pack(0, LOOPBACK_INDEX, 0, TC_H_ROOT, 0) + _kind(kind)
        try:
            self._rtnl.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body, f"probe {kind}")
        except HostError as error:
            if error.errno == errno.ENOENT:
                return (
                    f"this kernel has no {kind} (modprobe sch_{kind}; the module is in the package "
                    "linux-modules-extra or kernel-modules-extra of many distributions)"
                )
            if error.errno != errno.EINVAL:
                return f"{kind} cannot be used: {error.text}"
        return ""

    def of(self, index: int) -> tuple[Qdisc, ...]:
        answers = self._rtnl.dump(RTM_GETQDISC, TCMSG.pack(0, index, 0, 0, 0), "list queueing disciplines")
        found = []
        for kind, body in answers:
            if kind != RTM_NEWQDISC:
                continue
            _family, device, handle, parent, _info = TCMSG.unpack_from(body)
            if device == index:
                name = attr_map(body, TCMSG.size).get(TCA_KIND, b"").rstrip(b"\0").decode("ascii", "replace")
                found.append(Qdisc(name, handle, parent))
        return tuple(found)

    def add_root(self, index: int, handle: int, kind: str, options: bytes, operation: str) -> None:
        body = TCMSG.pack(0, index, handle, TC_H_ROOT, 0) + _kind(kind) + pack_attr(TCA_OPTIONS, options)
        self._rtnl.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body, operation)

    def remove_root(self, index: int, handle: int, operation: str) -> None:
        try:
            self._rtnl.request(RTM_DELQDISC, 0, TCMSG.pack(0, index, handle, TC_H_ROOT, 0), operation)
        except HostError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise


def tbf_options(rate_mbit: float, queue_ms: float) -> bytes:
    """A token bucket: so many Mbit/s, and a queue of at most so many milliseconds at that rate (tc-tbf(8))."""
    rate = int(rate_mbit * 125_000)  # bytes a second
    burst = max(64 * 1024, rate // 200)  # 5 ms, and never less than a large segment
    limit = min(U32_MAX, burst + int(rate * queue_ms / 1000))
    spec = RATESPEC.pack(0, LINKLAYER_ETHERNET, 0, -1, 0, min(rate, U32_MAX))
    parms = spec + RATESPEC.pack(0, 0, 0, 0, 0, 0) + TBF_QOPT_TAIL.pack(limit, 0, 0)
    rate64 = pack_attr(TCA_TBF_RATE64, struct.pack("=Q", rate)) if rate >= 1 << 32 else b""
    return pack_attr(TCA_TBF_PARMS, parms) + rate64 + pack_attr(TCA_TBF_BURST, struct.pack("=I", burst))


def netem_options(  # noqa: PLR0917
    limit: int, delay_ms: float = 0.0, jitter_ms: float = 0.0, corrupt: float = 0.0, reorder: float = 0.0, gap: int = 0
) -> bytes:
    """tc-netem(8): packets held at most, delay and its uniform spread, probabilities 0 to 1 of damage and of overtaking
    (those that overtake are not delayed; `gap`: only every gap-th may)."""
    options = NETEM_QOPT.pack(0, limit, 0, gap, 0, 0)
    if reorder:
        options += pack_attr(TCA_NETEM_REORDER, struct.pack("=II", int(reorder * U32_MAX), 0))
    if corrupt:
        options += pack_attr(TCA_NETEM_CORRUPT, struct.pack("=II", int(corrupt * U32_MAX), 0))
    options += pack_attr(TCA_NETEM_LATENCY64, struct.pack("=q", int(delay_ms * 1e6)))
    return options + pack_attr(TCA_NETEM_JITTER64, struct.pack("=q", int(jitter_ms * 1e6)))


def _kind(kind: str) -> bytes:
    return pack_attr(TCA_KIND, kind.encode("ascii") + b"\0")
