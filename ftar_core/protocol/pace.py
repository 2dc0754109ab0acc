"""Stragglers: who makes the others wait, step after step, without ever being hung.

Every replica tells with each result how long it computed (to its last gradient) and how long it then waited for the
ring. A synchronous step takes as long as its slowest replica, so waiting is the mirror image of somebody else's
computing: the straggler is who computes longest and waits least. Compared is computing time with the median of the
*others*, since in a small job a replica would pull its own median along.

One slow step is chance (a page fault, a checkpoint's echo), so a hint comes after `straggler_steps` of them in a row.
It is a hint, not a verdict: nothing is done about it. Of a replica with several ranks, the rank that computed longest
is named; ranks that wait for each other inside of forward and backward cannot be told apart by this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ftar_core.wire.messages import Done

WINDOW = 20  # steps that the shown medians are over
LEAST_MS = 5.0  # a difference smaller than this is the scheduler's, whatever its ratio


def ratios(compute_ms: Mapping[str, float]) -> dict[str, float]:
    """Each one's computing time by the median of the others'; 1 where there is nothing to compare with."""
    found = dict.fromkeys(compute_ms, 1.0)
    count = len(compute_ms) - 1
    if count < 1:
        return found
    # Once for all, since this runs between the last report and the commit: there are three medians of what is left when
    # one is taken out, by whether that one is below, between or above the two in the middle.
    ordered = sorted(compute_ms.values())
    low, high = (count - 1) // 2, count // 2
    below = (ordered[low + 1] + ordered[high + 1]) / 2
    between = (ordered[low] + ordered[high + 1]) / 2
    above = (ordered[low] + ordered[high]) / 2
    for name, mine in compute_ms.items():
        middle = below if mine <= ordered[low] else between if mine <= ordered[high] else above
        if middle > 0 and abs(mine - middle) >= LEAST_MS:
            found[name] = mine / middle
    return found


@dataclass
class Pace:
    """Of one replica, over its last WINDOW steps."""

    compute_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    wait_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slow_steps: int = 0  # in a row
    calm_steps: int = 0
    straggler: bool = False
    rank: int = 0  # that computed longest in the last step

    def medians(self) -> tuple[float, float] | None:
        """(computing, waiting) in ms a step; None before its first step."""
        return (median(self.compute_ms), median(self.wait_ms)) if self.compute_ms else None


@dataclass(frozen=True)
class Hint:
    replica: str
    begins: bool  # False: it keeps pace again
    reason: str


class Paces:
    """Fed with the reports of every committed step."""

    def __init__(self) -> None:
        self.by_name: dict[str, Pace] = {}
        self.lead_ms = 0.0  # so much longer than the others' median a straggler has computed in the last step

    def committed(self, done: Mapping[str, Done], factor: float, steps: int, ranks: int = 1) -> list[Hint]:
        """What is to be said now. `factor` x the median of the others for `steps` steps in a row is a straggler."""
        for name in set(self.by_name) - set(done):
            del self.by_name[name]  # it contributes no more; a later life begins anew
        compute = {name: max(0.0, d.step_ms - d.wait_ms) for name, d in done.items()}
        hints: list[Hint] = []
        self.lead_ms = 0.0
        for name, ratio in ratios(compute).items():
            pace = self.by_name.setdefault(name, Pace())
            pace.compute_ms.append(compute[name])
            pace.wait_ms.append(done[name].wait_ms)
            pace.rank = done[name].slow_rank
            slow = ratio >= factor
            pace.slow_steps, pace.calm_steps = (pace.slow_steps + 1, 0) if slow else (0, pace.calm_steps + 1)
            if not pace.straggler and pace.slow_steps >= steps:
                pace.straggler = True
                hints.append(Hint(name, True, self._why(name, steps, ranks)))
            elif pace.straggler and pace.calm_steps >= steps:
                pace.straggler = False
                hints.append(Hint(name, False, f"it keeps pace with the others again, for {steps} steps"))
            if pace.straggler and ratio > 1:
                self.lead_ms = max(self.lead_ms, compute[name] * (1 - 1 / ratio))
        return hints

    def ratio(self, name: str) -> float | None:
        """Of its median by the median of the others' medians."""
        known = {n: medians[0] for n, pace in self.by_name.items() if (medians := pace.medians()) is not None}
        return ratios(known).get(name) if len(known) > 1 else None

    def _why(self, name: str, steps: int, ranks: int) -> str:
        pace, ratio = self.by_name[name], self.ratio(name)
        compute, wait = pace.medians() or (0.0, 0.0)
        times = f"{ratio:.1f} x the median of the others" if ratio is not None else "longer than the others"
        rank = f"; rank {pace.rank} computes longest" if ranks > 1 else ""
        return f"computes {compute:.0f} ms a step, {times}, and waits {wait:.0f} ms, for {steps} steps now{rank}"
