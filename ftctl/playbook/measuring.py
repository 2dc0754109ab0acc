"""What an incident cost: from the replicas' journals where this machine has them (a lab), else from the coordinator.

The journals are the better witness: every replica's own clock of gradients and commits, on one machine. A coordinator
says how soon it knew and how long the survivors waited; what only journals can tell is "not measured" then, which meets
no objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.api.models import StallState
from ftctl.lab import analysis
from ftctl.lab.analysis import NotEnough
from ftctl.lab.journal import Journals
from ftctl.playbook.journal import Record


@dataclass(frozen=True)
class Cost:
    """Of one incident; None where it does not apply, or `missing` says why it could not be measured."""

    incident: int
    what: str
    aim: str
    repeat: int
    detect_ms: float | None = None
    stall_ms: float | None = None
    rejoin_s: float | None = None
    steps_lost: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """An incident and the time that is its own: until the next one begins, or the method ends."""

    number: int
    what: str
    replica: str
    nic: str
    aim: str
    repeat: int
    start: float
    end: float
    unix_start: float
    unix_end: float


def windows(records: Sequence[Record]) -> list[Window]:
    """The incidents of a run's journal, each with its window."""
    begun = [r for r in records if r["kind"] == "incident"]
    end = next((r for r in reversed(records) if r["kind"] in ("hypothesis", "sample", "action")), records[-1])
    found = []
    for index, record in enumerate(begun):
        later = next((n for n in begun[index + 1 :] if n["mono"] > record["mono"] + 0.001), end)
        place = "/".join(part for part in (record["node"], record["nic"]) if part)
        who = record["replica"] + (f" rank {record['rank']}" if record["rank"] is not None else "")
        aim = " on ".join(part for part in (who, place) if part)
        found.append(
            Window(
                record["number"],
                record["what"],
                record["replica"],
                record["nic"],
                aim,
                record["repeat"],
                record["mono"],
                max(later["mono"], record["mono"]),
                record["time"],
                max(later["time"], record["time"]),
            )
        )
    return found


def from_journals(journals: Journals, window: Window, replicas: Sequence[str]) -> Cost:
    """`replicas`: all of the job. The victim is no survivor."""
    left = _left(journals, window, replicas)
    survivors = (
        [name for name in replicas if name != window.replica] if left or window.what == "rejoin" else list(replicas)
    )
    missing: dict[str, str] = {}
    stall: float | None = None
    steps = analysis.steps_of(journals, survivors)
    try:
        calm = analysis.calm_before(steps, window.start)
        stall = analysis.worst_stall(steps, calm, window.start, window.end).excess_ms
    except NotEnough as error:
        missing["stall_ms"] = str(error)
    detect: float | None = None
    if left:
        detect = analysis.first_epoch_without(journals, survivors, window.replica, window.start)
    elif window.nic:
        detect = analysis.rail_event(journals, replicas, window.nic, window.start, state="DOWN")
    rejoin: float | None = None
    if left:
        gone = analysis.first_without(journals, survivors, window.replica, window.start)
        rejoin = analysis.first_contribution(journals, window.replica, gone if gone is not None else window.start)
    elif window.what == "rejoin":
        rejoin = analysis.first_contribution(journals, window.replica, window.start)
    return Cost(
        window.number,
        window.what,
        window.aim,
        window.repeat,
        detect_ms=None if detect is None or detect > window.end else (detect - window.start) * 1000,
        stall_ms=stall,
        rejoin_s=None if rejoin is None else rejoin - window.start,
        steps_lost=analysis.steps_lost(journals, survivors, window.start, window.end),
        missing=missing,
    )


def _left(journals: Journals, window: Window, replicas: Sequence[str]) -> bool:
    """The victim was out of the job for a while because of this incident."""
    others = [name for name in replicas if name != window.replica]
    if not window.replica or window.what == "rejoin" or not others:
        return False
    gone = analysis.first_epoch_without(journals, others, window.replica, window.start)
    return gone is not None and gone <= window.end


def from_stalls(stalls: Sequence[StallState], window: Window) -> Cost:
    """From what the coordinator noted of incidents, by its clock: good to the difference of the clocks."""
    mine = [s for s in stalls if window.unix_start - 0.5 <= s.time <= window.unix_end]
    lost = [s for s in mine if s.kind == "replica-lost" and s.replica == window.replica]
    joined = [s for s in mine if s.kind == "replica-joined" and s.replica == window.replica]
    waits = [s.stall_ms for s in mine if s.stall_ms is not None]
    detect = next((s.detect_ms for s in lost if s.detect_ms is not None), None)
    return Cost(
        window.number,
        window.what,
        window.aim,
        window.repeat,
        detect_ms=detect,
        stall_ms=max(waits, default=0.0 if not mine else None),
        rejoin_s=joined[-1].time - window.unix_start if joined else None,
        missing={"steps_lost": "only the replicas' journals tell, and they are not on this machine"},
    )
