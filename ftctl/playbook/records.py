"""What the lines of a run's journal look like: whoever reads one back (reports, comparisons) need not doubt it.

Journals travel: they are artifacts of CI, they come from older versions and from disks that were full. So every number
has bounds, and what is missing has a default; unknown keys and kinds are left alone.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MOST = 1e12  # of any time or measure: no run lasts as long, and no clock shows it
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class Line(msgspec.Struct):
    """Unix seconds, and the controller's monotonic clock."""

    time: Number
    mono: Number


class Head(Line):
    schema: int
    name: str
    description: str = ""
    repeat: int = 1


class Note(Line):
    text: str = ""


class Hypothesis(Line):
    probe: str = ""
    met: bool = False
    detail: str = ""


class Incident(Line):
    number: Count
    what: str
    node: str
    nic: str
    replica: str
    repeat: Count


class Action(Line):
    what: str
    incident: Count | None = None
    fault: str | None = None
    target: str | None = None
    detail: str | None = None
    faults: list[str] | None = None


class Sample(Line):
    step: Count | None = None
    epoch: str | None = None
    contributors: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    replicas: dict[str, str] | None = None
    step_ms: Number | None = None
    loss: Number | None = None


class Told(msgspec.Struct):
    time: Number
    source: str
    kind: str
    object: str
    reason: str
    injected: bool = False


class Event(Line):
    event: Told


class Measured(Line):
    incident: Count
    what: str
    aim: str
    repeat: Count = 0
    detect_ms: Number | None = None
    stall_ms: Number | None = None
    rejoin_s: Number | None = None
    steps_lost: Number | None = None


class Objective(msgspec.Struct):
    objective: Annotated[str, Meta(min_length=1)]
    limit: Number
    measured: Number | None
    count: Count
    met: bool
    reason: str
    allowed: Number | None = None


class Verdict(Line):
    word: str
    passed: bool
    code: Annotated[int, Meta(ge=0, le=255)]
    reason: str
    hint: str = ""
    seconds: Annotated[float, Meta(ge=0, le=MOST)] = 0.0
    slower: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    objectives: list[Objective] = []


KINDS: dict[str, type[Line]] = {
    "run": Head,
    "note": Note,
    "hypothesis": Hypothesis,
    "incident": Incident,
    "action": Action,
    "sample": Sample,
    "event": Event,
    "measured": Measured,
    "verdict": Verdict,
}


def problem(record: Any) -> str:
    """Why this is no record of a journal; empty if it is one."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "it has no kind"
    try:
        msgspec.convert(record, KINDS.get(record["kind"], Line))
    except (msgspec.ValidationError, OverflowError) as error:
        return str(error)
    return ""
