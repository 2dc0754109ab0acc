"""Hints for corruption before the reduction: a replica whose own gradient is of quite another size than the others'.

What is wrong with a replica's gradients before they are added up is in everybody's sum and in nobody's digest. The one
trace is their size: replicas train the same model on batches of the same kind, so the norms of their gradients are
alike, and each has a history. Compared are logarithms, since a norm is off by a factor: the replica's own with those of
its last steps, and its distance from the median of the others with what that distance was in them, each in units of the
usual spread (median absolute deviation). Both must be far off: a step at which all norms jump, or a replica whose data
are always different, says nothing; of two replicas, the one that is as ever is not called strange for the other.

It is a hint and no more: a strange batch looks the same. It is said at most once in QUIET_STEPS.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from ftar_core.wire.messages import Done

HISTORY, LEAST = 50, 10  # steps that are remembered; that are needed
FACTOR = 8.0  # spreads: of a normal distribution nothing is so far off in the life of a job
LEAST_LOG = math.log(4.0)  # a smaller factor than 4 is no news, however steady it was before
TO_SIGMA = 1.4826  # from a median absolute deviation, for normal distributions
QUIET_STEPS = 100


@dataclass
class History:
    logs: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    distances: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))  # from the others' median
    said_at: int = -QUIET_STEPS


def far(value: float, known: Iterable[float]) -> bool:
    """Is it far from these, by their spread?"""
    values = list(known)
    middle = median(values)
    if abs(value - middle) <= LEAST_LOG:
        return False  # nearly always
    spread = TO_SIGMA * median([abs(v - middle) for v in values])
    return abs(value - middle) > max(FACTOR * spread, LEAST_LOG)


class Outliers:
    """Fed with the reports of every committed step."""

    def __init__(self) -> None:
        self.by_name: dict[str, History] = {}

    def committed(self, step: int, done: Mapping[str, Done]) -> list[tuple[str, str]]:
        """(replica, what is to be said about it)"""
        for name in set(self.by_name) - set(done):
            del self.by_name[name]  # a later life begins anew
        logs = {n: math.log(d.norm) for n, d in done.items() if d.norm > 0 and math.isfinite(d.norm)}
        ordered = sorted(logs.values())
        found: list[tuple[str, str]] = []
        for name, mine in logs.items():
            history = self.by_name.setdefault(name, History())
            others = _median_without(mine, ordered)
            if others is not None:
                distance = mine - others
                known = len(history.distances) >= LEAST
                quiet = step - history.said_at < QUIET_STEPS
                if known and not quiet and far(mine, history.logs) and far(distance, history.distances):
                    history.said_at = step
                    found.append((name, _why(step, *map(math.exp, (mine, median(history.logs), others)))))
                history.distances.append(distance)
            history.logs.append(mine)
        return found


def _median_without(value: float, ordered: list[float]) -> float | None:
    """The median of the others."""
    count = len(ordered) - 1
    if count < 1:
        return None
    at = bisect_left(ordered, value)
    low, high = (i + (i >= at) for i in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


def _why(step: int, norm: float, usual: float, others: float) -> str:
    return (
        f"the norm of its own gradient at step {step} is {norm:.3g}; {usual:.3g} is usual for it, and the others have "
        f"{others:.3g}: a hint only, it may be its data, or corruption before the reduction"
    )
