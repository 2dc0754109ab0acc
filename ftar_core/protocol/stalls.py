"""How long an incident stopped the survivors, and how long a calm step takes.

Stall of a step = (commit - last survivor's gradient produced) minus the median of 20 calm steps. Members stamp their
last gradient with their own clock, which on another machine starts anywhere. So the difference to the commit is taken
per replica, against that replica's own median: a constant offset cancels. Of the survivors the smallest is the stall:
who produced last had waited least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from ftar_core.wire.messages import Done

CALM_STEPS = 20
KEPT = 100


@dataclass(frozen=True)
class Incident:
    """`at` is the coordinator's clock; the view makes it a date."""

    at: float
    kind: str  # replica-lost | replica-joined | replica-drained | step-late
    replica: str
    step: int
    reason: str
    detect_ms: float | None = None
    stall_ms: float | None = None


class Stalls:
    """Fed with every commit; incidents that began before it get their stall from it."""

    def __init__(self) -> None:
        self.incidents: deque[Incident] = deque(maxlen=KEPT)
        self.open: list[Incident] = []
        self._lag: dict[str, deque[float]] = {}  # commit - produced, calm steps, seconds
        self._steps: deque[float] = deque(maxlen=CALM_STEPS)
        self._last_commit: float | None = None

    def begin(self, incident: Incident) -> None:
        """Something happened that the next commit will show."""
        self.open.append(incident)

    def committed(self, done: Mapping[str, Done], now: float) -> None:
        """A step was committed now, from these reports."""
        lags = {name: now - d.produced_at for name, d in done.items() if d.produced_at > 0}
        if self.open:
            excess = [lag - median(self._lag[n]) for n, lag in lags.items() if self._lag.get(n)]
            stall_ms = max(0.0, min(excess)) * 1000 if excess else None
            for i in self.open:
                self.incidents.append(replace(i, stall_ms=stall_ms))
            self.open.clear()
        else:
            for name, lag in lags.items():
                self._lag.setdefault(name, deque(maxlen=CALM_STEPS)).append(lag)
            if self._last_commit is not None:
                self._steps.append(now - self._last_commit)
        self._last_commit = now

    def restart(self) -> None:
        """The clock of steps stood still (a hold, a recovery): the next interval says nothing."""
        self._last_commit = None

    def median_step_s(self) -> float | None:
        """Of the last calm steps; None before the first two commits."""
        return median(self._steps) if self._steps else None
