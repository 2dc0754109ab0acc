"""Set a node apart, and let it be used again."""

from __future__ import annotations

from fastapi import APIRouter

from agents.api.cordon import CordonAnswer, CordonRequest
from agents.http.auth import Operator, ThisAgent
from agents.http.context import Agent
from agents.problems import ApiProblem

router = APIRouter(tags=["node"])


@router.post("/v1/node/cordon")
async def cordon(agent: ThisAgent, who: Operator, wish: CordonRequest) -> CordonAnswer:
    """Start no replica here any more, over restarts of the agent too; what runs goes on."""
    _check(agent, "cordon", wish)
    changed, view = await agent.fault_pool.call(
        f"node {agent.settings.node}", "failed", agent.cordon.set, who.name, wish.reason, dry_run=wish.dry_run
    )
    return CordonAnswer(changed=changed, cordon=view)


@router.post("/v1/node/uncordon")
async def uncordon(agent: ThisAgent, who: Operator, wish: CordonRequest) -> CordonAnswer:
    """Replicas may be started here again; those that wait for it start at once."""
    _check(agent, "uncordon", wish)
    changed = await agent.fault_pool.call(
        f"node {agent.settings.node}", "failed", agent.cordon.clear, who.name, wish.reason, dry_run=wish.dry_run
    )
    return CordonAnswer(changed=changed, cordon=agent.cordon.view())


def _check(agent: Agent, verb: str, wish: CordonRequest) -> None:
    if not wish.reason.strip():
        thing = f"{verb} of {agent.settings.node}"
        raise ApiProblem("bad-request", thing, "a reason is required", "--reason TEXT")
