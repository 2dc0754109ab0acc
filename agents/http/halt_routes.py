"""No more faults here, and faults again. They exist also where none may be injected: old ones may still be in force."""

from __future__ import annotations

from fastapi import APIRouter

from agents.api.halt import HaltAnswer, HaltRequest, HaltView
from agents.http.auth import Operator, ThisAgent
from agents.http.context import Agent
from agents.injection.ledger import Entry
from agents.problems import ApiProblem
from agents.views import fault_view

router = APIRouter(tags=["faults"])


@router.post("/v1/faults/halt")
async def halt(agent: ThisAgent, who: Operator, wish: HaltRequest) -> HaltAnswer:
    """Take everything back and inject nothing, over restarts of the agent too, until it is allowed again."""
    _check(agent, "halt", wish)
    changed, view = agent.halt.hold(who.name, wish.reason)
    thing = f"faults of {agent.settings.node}"
    entries = await agent.fault_pool.call(thing, "in-force", _carry_out, agent, view, f"halted by {who.name}")
    injector = agent.parts.injector
    return HaltAnswer(
        changed=changed, halt=agent.halt.view(), faults=[fault_view(entry, injector) for entry in entries]
    )


@router.post("/v1/faults/allow")
async def allow(agent: ThisAgent, who: Operator, wish: HaltRequest) -> HaltAnswer:
    """Faults may be injected again; none that was taken back comes back."""
    _check(agent, "allow", wish)
    thing = f"faults of {agent.settings.node}"
    changed = await agent.fault_pool.call(thing, "failed", agent.halt.clear, who.name, wish.reason)
    return HaltAnswer(changed=changed, halt=agent.halt.view())


def _carry_out(agent: Agent, view: HaltView, why: str) -> list[Entry]:
    """A disk that takes no record must not keep what is in force from being taken back."""
    problem: ApiProblem | None = None
    try:
        agent.halt.save(view)
    except ApiProblem as error:
        problem = error
    entries = agent.parts.injector.revert_all(why, settle=True)
    if problem is not None:
        raise problem
    return entries


def _check(agent: Agent, verb: str, wish: HaltRequest) -> None:
    if not wish.reason.strip():
        thing = f"{verb} of faults on {agent.settings.node}"
        raise ApiProblem("bad-request", thing, "a reason is required", "--reason TEXT")
