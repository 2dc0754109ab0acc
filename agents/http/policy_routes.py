"""What is decided about verdicts here, and whether it is done."""

from __future__ import annotations

from fastapi import APIRouter

from agents.api.policy import ModeAnswer, ModeRequest, PolicyAnswer
from agents.http.auth import Operator, ThisAgent, Viewer
from agents.problems import ApiProblem

router = APIRouter(tags=["policy"])


@router.get("/v1/policy")
async def policy(agent: ThisAgent, _who: Viewer) -> PolicyAnswer:
    """Mode, rules, limits, the replicas that are out because of it, and the last decisions. From memory only."""
    return agent.policy.answer()


@router.post("/v1/policy/mode")
async def mode(agent: ThisAgent, who: Operator, wish: ModeRequest) -> ModeAnswer:
    """Observe, recommend or act from now on, over restarts of the agent too."""
    thing = f"policy of {agent.settings.node}"
    if not wish.reason.strip():
        raise ApiProblem("bad-request", thing, "a reason is required", "--reason TEXT")
    changed = await agent.job_pool.call(thing, "failed", agent.policy.set_mode, wish.mode, who.name, wish.reason)
    return ModeAnswer(mode=wish.mode, changed=changed)
