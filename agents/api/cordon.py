"""A node that is set apart: the part of the contract (models.py) behind `ftctl cordon`, `uncordon` and `drain node`.

| route | role | asks | answers |
|---|---|---|---|
| POST /v1/node/cordon, uncordon | operator | CordonRequest | CordonAnswer |

A cordon outlives the agent. While it stands the agent starts no replica, and refuses a rejoin; what runs goes on. A
second cordon changes nothing: who was first, why and since when stays as it is.
"""

from __future__ import annotations

from agents.api.base import Answer, Request


class CordonRequest(Request):
    reason: str
    dry_run: bool = False


class CordonView(Answer):
    """`by`: the principal; `since`: Unix seconds."""

    by: str
    reason: str
    since: float


class CordonAnswer(Answer):
    """`changed`: whether this call did it, or with `dry_run` would have. `cordon`: what stands now, if one does."""

    changed: bool
    cordon: CordonView | None = None
