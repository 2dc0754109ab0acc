"""The one error of the fault routes: what, why, what next, and what is left behind."""

from __future__ import annotations

from agents.faults.contract import Refusal
from agents.injection.ledger import Entry


class FaultProblem(Exception):
    """`code` is one of agents.api.models.ERROR_CODES. Code "in-force" means: it may still be in force; all others mean
    that nothing is left of it. `entry` is the fault, where one came to exist."""

    def __init__(self, code: str, thing: str, reason: str, hint: str = "", entry: Entry | None = None) -> None:
        super().__init__(f"{thing}: {reason}")
        self.code = code
        self.thing = thing
        self.reason = reason
        self.hint = hint
        self.entry = entry

    @classmethod
    def refused(cls, thing: str, refusal: Refusal) -> FaultProblem:
        return cls(refusal.code, thing, refusal.reason, refusal.hint)
