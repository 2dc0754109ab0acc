"""How well the node is: verdicts and incidents, what other monitors say, and what an operator has seen to."""

from __future__ import annotations

from fastapi import APIRouter

from agents.api.health import (
    ClearAnswer,
    ClearRequest,
    HealthAnswer,
    VerdictsAnswer,
    VerdictsRequest,
)
from agents.health.foreign import ForeignProblem
from agents.http.auth import Operator, ThisAgent, Viewer
from agents.problems import ApiProblem

router = APIRouter(tags=["health"])


@router.get("/v1/health")
async def health(agent: ThisAgent, _who: Viewer) -> HealthAnswer:
    """All verdicts of this node, worst first, its incidents, and what looks. From memory only."""
    return agent.parts.health.answer()


@router.post("/v1/verdicts")
async def verdicts(agent: ThisAgent, _who: Operator, said: VerdictsRequest) -> VerdictsAnswer:
    """What another monitor found; policy input like our own."""
    try:
        return VerdictsAnswer(incidents=agent.foreigners.take(said))
    except ForeignProblem as error:
        raise ApiProblem("bad-request", f"monitor {said.source}", str(error)) from None


@router.post("/v1/clear")
async def clear(agent: ThisAgent, who: Operator, wish: ClearRequest) -> ClearAnswer:
    """An operator has seen to it: sticky verdicts on it, and what they were made from, are forgotten."""
    reason = wish.reason.strip()
    if not reason:
        raise ApiProblem("bad-request", f"clear {wish.kind}", "a reason is required", "--reason TEXT")
    name = wish.object if wish.object.startswith(f"{wish.kind} ") else f"{wish.kind} {wish.object}"
    desk = agent.parts.health
    if not desk.knows(wish.kind, name):
        known = ", ".join(desk.names(wish.kind)) or "none"
        reason = f"no {wish.kind} of this node is called that (known: {known})"
        raise ApiProblem("not-found", f"{agent.settings.node}/{wish.object}", reason, "ftctl health")
    cleared = desk.clear(wish.kind, name, f"cleared by {who.name}: {reason}")
    text = f"{name} of {agent.settings.node}: {cleared} cleared" if cleared else f"{name}: nothing was to be cleared"
    return ClearAnswer(cleared=cleared, text=text)
