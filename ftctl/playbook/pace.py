"""How much slower than it should be is this machine today? Pure.

A lab paces its steps (200 ms of them by default), so the steps before the first incident, which nothing disturbs, tell:
where they take three times as long as they are paced to, other work has the cores, and recovery takes longer for the
same reason. Limits and time-outs are for a machine that keeps the pace; on a slower one they grow by the same factor,
and the reports say so. A cluster that is no lab has no pace to be compared with: there they are what they are.

Rejected: the load average (it counts what is niced away as well), and a calibration loop (it would load the machine
that it measures).
"""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT = 40  # samples: some ten seconds
# What two idle cores need beyond the pace for three replicas (240 to 260 ms for 200) is no slowness.
USUAL = 1.5
MOST = 6.0  # a machine that is slower than that tells nothing, and time-outs are to end some day


class Pace:
    def __init__(self, paced_ms: float | None) -> None:
        """`paced_ms`: what an undisturbed step should take; None or 0: nobody knows."""
        self.paced_ms = paced_ms or None
        self.disturbed = False  # from the first incident on the length of a step is the experiment's, not the machine's
        self._seen: deque[float] = deque(maxlen=KEPT)

    def saw(self, step_ms: float | None) -> None:
        if step_ms is not None and not self.disturbed:
            self._seen.append(step_ms)

    @property
    def step_ms(self) -> float | None:
        """The usual length of an undisturbed step."""
        return median(self._seen) if self._seen else None

    @property
    def slower(self) -> float:
        """1 for a machine that keeps the pace, more for one that is that many times slower."""
        if self.paced_ms is None or self.step_ms is None:
            return 1.0
        times = self.step_ms / self.paced_ms
        return 1.0 if times <= USUAL else round(min(times, MOST), 2)
