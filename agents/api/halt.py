"""No faults, until somebody allows them again: the part of the contract (models.py) behind `ftctl faults halt|allow`.

| route | role | asks | answers |
|---|---|---|---|
| POST /v1/faults/halt, allow | operator | HaltRequest | HaltAnswer |

A halt outlives the agent. It takes back what is in force and refuses every injection. A second halt takes back what is
left, if anything is; who was first, why and since when stays as it is.
"""

from __future__ import annotations

from pydantic import Field

from agents.api.base import Answer, Request
from agents.api.faults import FaultView


class HaltRequest(Request):
    reason: str


class HaltView(Answer):
    """`by`: the principal; `since`: Unix seconds."""

    by: str
    reason: str
    since: float


class HaltAnswer(Answer):
    """`changed`: whether this call did it. `halt`: what stands now. `faults`: those it took back, or could not."""

    changed: bool
    halt: HaltView | None = None
    faults: list[FaultView] = Field(default_factory=list)
