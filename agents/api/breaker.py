"""When faults are to be halted because the fleet is no longer well: pure; standard library only.

A guard looks before a fault is made; what follows from several of them, or from a real failure meanwhile, it cannot
know. So while faults are in force somebody watches: each agent with the coordinator's word, the controller of a
playbook with what all agents say. When too few replicas contribute, or too few nodes answer, for longer than what a
recovery takes, all faults are taken back and no more are made until somebody allows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REPLICAS_PERCENT = 50.0
NODES_PERCENT = 50.0
AFTER_S = 5.0


@dataclass(frozen=True)
class Share:
    """`good` of `all`, which must be at least so many percent; `all` 0: not known, which is neither well nor unwell."""

    what: str  # "replicas contribute"
    good: int
    all: int
    bound_percent: float

    @property
    def low(self) -> bool:
        return self.all > 0 and self.good * 100.0 < self.bound_percent * self.all


class Breaker:
    """One watch over the fleet. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(self, now: float, shares: Iterable[Share], after_s: float) -> str:
        """Why faults are to be halted now; empty: they are not, or not for so long yet."""
        shares = tuple(shares)
        for share in shares:
            if not share.low:
                self._since.pop(share.what, None)
        for share in shares:
            if share.low and now - self._since.setdefault(share.what, now) >= after_s:
                percent = share.good * 100.0 / share.all
                return (
                    f"{share.good} of {share.all} {share.what} ({percent:.0f} %) for {after_s:g} s:"
                    f" below {share.bound_percent:g} %"
                )
        return ""

    def calm(self) -> None:
        """Nothing is in force: what is low now is not a fault's doing."""
        self._since.clear()
