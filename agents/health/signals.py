"""What monitors tell the incident book (incidents.py).

Two kinds of news. A reading holds until the next one: the monitor says, for every object it watches, all that is wrong
with it now (`Observed`). A line in a log or an event of a driver happens and is over (`Signal` by itself): how long it
counts is the signal's `ends`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from agents.api.words import Action, Health

OWN = "ft-agent"
QUIET_S = 60.0  # that an occurrence counts after its last line


class Ends(str, Enum):
    """When something that happened counts as over."""

    QUIET = "quiet"  # not said for `quiet_s`
    RECOVERY = "recovery"  # a reading that proves the object well (Observed.recovered) came after it
    CLEAR = "clear"  # an operator clears it


@dataclass(frozen=True)
class Signal:
    """One thing that is wrong, or worth recording, with one object; fields as in agents.api.health.Verdict.

    `process` tells apart what is the same line of different lives: the second Xid 31 of the same process is the first
    one again, that of another process is new. `unit`: repeats are counted of this part of the object. `via`: the way on
    which it was heard; what is heard on several counts once.
    """

    kind: str
    object: str
    code: str
    health: Health
    reason: str
    action: Action = Action.NONE
    hint: str = ""
    evidence: tuple[str, ...] = ()
    uuid: str = ""
    injected: bool = False
    fault: str = ""
    simulated: bool = False
    source: str = OWN
    ends: Ends = Ends.QUIET
    quiet_s: float = QUIET_S
    process: str = ""
    repeat: Repeat | None = None
    unit: str = ""
    via: str = ""


@dataclass(frozen=True)
class Repeat:
    """Seen `times` times within `within_s` seconds on one object: `action` is suggested instead."""

    times: int
    within_s: float
    action: Action


@dataclass(frozen=True)
class Observed:
    """One object as a monitor reads it now. Without signals it is as `health` and `reason` say (healthy, or unknown for
    what is not in use). `recovered`: this reading proves that what was broken is whole again."""

    kind: str
    object: str
    reason: str
    health: Health = Health.HEALTHY
    uuid: str = ""
    simulated: bool = False
    recovered: bool = True
    signals: tuple[Signal, ...] = field(default=())
