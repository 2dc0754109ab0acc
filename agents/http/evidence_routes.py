"""The stacks of a replica's processes on this node."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from agents.api.evidence import StacksAnswer, StacksRequest
from agents.http.auth import Operator, ThisAgent
from agents.problems import ApiProblem
from ftar_core.wire.ids import valid_name

router = APIRouter(tags=["job"])


@router.post("/v1/replicas/{replica}/stacks")
async def stacks(
    agent: ThisAgent, _who: Operator, replica: Annotated[str, Path(max_length=64)], wish: StacksRequest
) -> StacksAnswer:
    """Python stacks and kernel states of all threads, also while the GIL is held. Nothing is stopped or woken up."""
    if not valid_name(replica):
        raise ApiProblem("unknown-replica", f"replica {replica}", "not a replica's name", "ftctl status lists them")
    ranks = await agent.evidence_pool.call(
        f"replica {replica}", "failed", agent.evidence.of_replica, replica, wish.rank
    )
    return StacksAnswer(ranks=ranks)
