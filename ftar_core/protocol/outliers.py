"""Hints for corruption before the reduction: a replica whose own gradient is of quite another size than the others'.

What is wrong with a replica's gradients before they are added up is in everybody's sum and in nobody's digest. The one
trace is their size: replicas train the same model on batches of the same kind, so the norms of their gradients are
alike, and each has a history. Compared are logarithms, since a norm is off by a factor, with the median of the others
and with the median of the replica's own last steps, each in units of its usual spread (median absolute deviation). Both
must be far off: a step at which all norms jump, or a replica whose data are always different, says nothing.

It is a hint and no more: a strange batch looks the same. It is said at most once in QUIET_STEPS.
"""

from __future__ import annotations

import math
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
    said_at: int = -QUIET_STEPS


def far(value: float, known: Iterable[float]) -> bool:
    """Is it far from these, by their spread?"""
    values = list(known)
    middle = median(values)
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
        found: list[tuple[str, str]] = []
        middle = median(logs.values()) if logs else 0.0
        for name, mine in logs.items():
            history = self.by_name.setdefault(name, History())
            strange = (
                len(logs) > 1
                and abs(mine - middle) > LEAST_LOG / 2  # nearly nobody: the rest costs more
                and len(history.logs) >= LEAST
                and far(mine, history.logs)
                and far(mine, [other for n, other in logs.items() if n != name])
            )
            if strange and step - history.said_at >= QUIET_STEPS:
                history.said_at = step
                usual = math.exp(median(history.logs))
                others = math.exp(median([other for n, other in logs.items() if n != name]))
                found.append((name, _why(step, math.exp(mine), usual, others)))
            history.logs.append(mine)
        return found


def _why(step: int, norm: float, usual: float, others: float) -> str:
    return (
        f"the norm of its own gradient at step {step} is {norm:.3g}; {usual:.3g} is usual for it, and the others have "
        f"{others:.3g}: a hint only, it may be its data, or corruption before the reduction"
    )
