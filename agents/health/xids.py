"""From an Xid, as NVML or the kernel log tells it, to what it means for its GPU. Pure.

The same Xid usually arrives twice, by NVML's event and by a line in the kernel log; `via` says by which, and the
incident book counts it once. The log knows more: the process, the unit, the severity, what it follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from agents.api.words import Action, Health
from agents.health.signals import QUIET_S, Ends, Signal
from agents.health.xidtable import NAMED, XidRow, XidTable

NVML, LOG, UNNUMBERED = "nvml", "log", "log without number"


@dataclass(frozen=True)
class Xid:
    """`object` as in verdicts, "gpu 3". `unit`: the part of the GPU that the line names ("GPC 0, TPC 1, SM 0").
    `previous`: the Xid that this one says it follows from; `recovery`: NVML field 230, where it is known."""

    code: int
    object: str
    via: str
    text: str
    uuid: str = ""
    pid: int | None = None
    process: str = ""
    unit: str = ""
    fatal: bool = False
    previous: int | None = None
    recovery: int | None = None
    injected: bool = False
    fault: str = ""
    simulated: bool = False


def signal_of(table: XidTable, xid: Xid, known: Collection[str], alive: Callable[[int], bool]) -> Signal:
    """`known`: the codes in the GPU's open incident. `alive`: whether that process is still there."""
    row = table.row(xid.code)
    if row is None:
        row = XidRow(xid.code, "an Xid that the table does not know", Health.DEGRADED, Action.CHECK)
    row, why = _meant(table, row, xid, known, alive)
    name = f" ({xid.process})" if xid.process else ""
    who = f", process {xid.pid}{name}" if xid.pid is not None else ""
    said = "; ".join(word for word in (row.sort, f"NVIDIA: {row.nvidia}" if row.nvidia else "") if word)
    about = f" ({said})" if said else ""
    return Signal(
        kind="gpu",
        object=xid.object,
        code=f"xid.{xid.code}",
        health=row.health,
        reason=f"Xid {xid.code}: {row.meaning}{why}{about}{who}",
        action=row.action,
        evidence=(xid.text,),
        uuid=xid.uuid,
        injected=xid.injected,
        fault=xid.fault,
        simulated=xid.simulated,
        ends=Ends.CLEAR if xid.fault else _ends(row),  # an injected one counts as long as its fault
        quiet_s=row.quiet_s or QUIET_S,
        process=str(xid.pid) if xid.pid is not None else "",
        repeat=row.repeat if xid.unit or not row.unit else None,
        unit=xid.unit if row.unit else "",
        via=xid.via,
    )


_PLAIN = (Action.NONE, Action.WATCH)


def _meant(
    table: XidTable, row: XidRow, xid: Xid, known: Collection[str], alive: Callable[[int], bool]
) -> tuple[XidRow, str]:
    """The row as it counts for this Xid, and what to add to its meaning."""
    if row.follows is not None:
        return _following(table, row, xid, known)
    if row.recovery:
        return _recovering(row, xid)
    if row.fatal is not None:
        if xid.fatal:
            return replace(row, health=Health.UNHEALTHY, action=row.fatal), ", fatal"
        return row, ", not fatal" if xid.via == LOG else ", severity not known"
    if row.if_died:
        if xid.pid is None or alive(xid.pid):
            return replace(row, action=Action.WATCH), "" if xid.pid is None else "; its process lives"
        return row, "; its process died"
    return row, ""


def _following(table: XidTable, row: XidRow, xid: Xid, known: Collection[str]) -> tuple[XidRow, str]:
    code = xid.previous if row.follows == NAMED else row.follows
    if code is None:
        return row, ""
    why = f", follows from Xid {code}"
    first = table.row(code)
    if first is None or first.follows is not None or f"xid.{code}" in known:
        return row, why  # that one has been judged, or cannot be
    return replace(row, health=first.health, action=first.action, ends=first.ends), f"{why}, which was not seen"


def _recovering(row: XidRow, xid: Xid) -> tuple[XidRow, str]:
    if xid.recovery is None:
        return row, ", not known which"
    action = row.recovery[xid.recovery] if 0 <= xid.recovery < len(row.recovery) else Action.CHECK
    health = Health.HEALTHY if action in _PLAIN else Health.UNHEALTHY
    return replace(row, health=health, action=action), f": {recovery_words(xid.recovery)}"


RECOVERY = ("none", "reset the GPU", "reboot the node", "drain its peers", "drain, then reset the GPU",
            "recover the IMEX domain", "reset its bus", "reboot the system")  # fmt: skip


def recovery_words(number: int) -> str:
    """NVML field 230."""
    return RECOVERY[number] if 0 <= number < len(RECOVERY) else f"action {number}"


def _ends(row: XidRow) -> Ends:
    if row.ends is not None:
        return row.ends
    return Ends.RECOVERY if row.health is Health.UNHEALTHY else Ends.QUIET


def switch_signal(switch: int, code: int, *, fatal: bool, link: str, text: str, fault: str = "") -> Signal:
    """An NVSwitch reported an SXid. A fatal one ends the traffic of all GPUs on that switch."""
    return Signal(
        kind="nvswitch",
        object=f"nvswitch {switch}",
        code=f"sxid.{code}",
        health=Health.UNHEALTHY if fatal else Health.DEGRADED,
        reason=f"SXid {code}, {'fatal' if fatal else 'not fatal'}{f', {link}' if link else ''}",
        action=Action.EVICT_NODE if fatal else Action.WATCH,
        evidence=(text,),
        injected=bool(fault),
        fault=fault,
        ends=Ends.CLEAR if fatal else Ends.QUIET,
        via=LOG,
    )
