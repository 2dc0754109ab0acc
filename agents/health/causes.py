"""What the incident book (incidents.py) keeps of one object: its open incident and the causes of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.api.health import MAX_EVIDENCE, MAX_LINE, Verdict
from agents.api.words import Action, Health
from agents.health.signals import Observed, Signal

WORST_FIRST = (Health.UNHEALTHY, Health.DEGRADED, Health.UNKNOWN, Health.HEALTHY)
_ACTIONS = list(Action)  # from nothing to the most


class Moment(NamedTuple):
    """`s`: seconds of a clock that neither jumps nor sleeps; `wall`: Unix seconds at the same moment, for people."""

    s: float
    wall: float


class News(NamedTuple):
    """`verdict` is new, changed, or came back; `over`: it closes the incident (healthy), or is what is left of it."""

    verdict: Verdict
    over: bool = False


@dataclass
class Cause:
    """`scope` is empty for what happened, else the monitor whose readings hold it up."""

    signal: Signal
    first: float
    last: float
    began: float  # this time, as `times` counts
    count: int = 1
    times: int = 1
    scope: str = ""
    evidence: list[str] = field(default_factory=list)
    process: str = ""
    heard: dict[str, int] = field(default_factory=dict)  # by way, this time

    def hear(self, via: str, count: int) -> int:
        """How many of these are new: what was heard on several ways counts as often as on the one that tells most."""
        before = max(self.heard.values(), default=0)
        self.heard[via] = self.heard.get(via, 0) + count
        return max(0, self.heard[via] - before)

    def add_evidence(self, lines: Sequence[str]) -> None:
        """The first lines and the last one stay."""
        for line in lines:
            text = line[:MAX_LINE]
            if text in self.evidence:
                continue
            if len(self.evidence) >= MAX_EVIDENCE:
                self.evidence.pop()
            self.evidence.append(text)


@dataclass
class OpenIncident:
    id: str
    opened: float
    last: float
    causes: dict[tuple[str, str], Cause] = field(default_factory=dict)
    worst: Signal | None = None
    codes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    count: int = 0
    injected: bool = True  # as long as everything in it is
    simulated: bool = False


@dataclass
class Thing:
    kind: str
    object: str
    uuid: str = ""
    seen: dict[str, Observed] = field(default_factory=dict)  # by scope
    well_since: float = 0.0
    incident: OpenIncident | None = None


def ranked(causes: Collection[Cause]) -> list[Cause]:
    """Worst first; of equal ones, what asks for more, then the older one."""
    return sorted(causes, key=lambda cause: (*rank(cause.signal), cause.first))


def rank(signal: Signal) -> tuple[int, int]:
    return WORST_FIRST.index(signal.health), -_ACTIONS.index(signal.action)


def span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
