"""What an agent does about verdicts: the part of the contract behind `ftctl policy`.

| route | role | asks | answers |
|---|---|---|---|
| GET /v1/policy | viewer | | PolicyAnswer |
| POST /v1/policy/mode | operator | ModeRequest | ModeAnswer |

A mode that was set outlives the agent, and goes before the one in its configuration.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from agents.api.base import Answer, Request

Mode = Literal["observe", "recommend", "act"]


class ModeRequest(Request):
    mode: Mode
    reason: Annotated[str, StringConstraints(min_length=1, max_length=500)]


class ModeAnswer(Answer):
    """`changed`: it was another one before."""

    mode: str
    changed: bool


class HeldView(Answer):
    """A replica that the policy took out, and brings back when `object` is well again."""

    replica: str
    kind: str
    object: str
    incident: str
    action: str
    since: float
    cordoned: bool = False


class DecisionView(Answer):
    """`kind`: policy.decided, policy.acted, policy.failed or policy.released, as in the events."""

    time: float
    kind: str
    object: str
    incident: str
    action: str
    reason: str


class PolicyAnswer(Answer):
    """`mode_by`: the principal, or "configuration". `source`: where the rules come from. `rules`: as in a policy file.
    `decisions`: the last ones, oldest first. `trouble`: why what was done may be forgotten."""

    node: str
    mode: str
    mode_by: str
    mode_since: float = 0.0
    source: str
    limits: dict[str, float]
    rules: list[dict[str, Any]]
    held: list[HeldView] = Field(default_factory=list)
    decisions: list[DecisionView] = Field(default_factory=list)
    trouble: str = ""
