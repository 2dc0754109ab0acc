"""Who asked this agent for a change: the part of the contract (models.py) behind `ftctl audit`.

| route | role | asks | answers |
|---|---|---|---|
| GET /v1/audit?since=UNIX&limit=N | viewer | | AuditAnswer, the oldest first, the newest `limit` of them |
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agents.api.base import Answer


class AuditRecord(Answer):
    """One request, carried out or refused. `who`: the principal of the token; empty where no known one was given.
    `source`: the address it came from, or "unix socket". `asks`: what the request said besides its reason.
    `result`: ok, an error's code (base.ERROR_CODES), or "unknown" where the agent did not live to answer."""

    time: float  # Unix seconds, when it came
    node: str
    who: str
    source: str
    action: str  # inject, revert, halt, drain, ...
    target: str = ""
    why: str = ""
    asks: dict[str, Any] = Field(default_factory=dict)
    result: str
    detail: str = ""  # of a refusal its reason; else the faults it is about
    ms: float = 0.0  # until the answer


class AuditAnswer(Answer):
    """`trouble`: why records could not be written to disk lately; they are kept in memory, at most 1000."""

    records: list[AuditRecord]
    trouble: str = ""
