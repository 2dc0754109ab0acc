"""Faults: what there is, what is in force, inject, revert."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from agents.api.blast import NO_FLEET, NO_LIMITS
from agents.api.models import FaultSpec, FaultView, InjectRequest, RevertAnswer
from agents.faults.contract import Params
from agents.http.auth import Chaos, Operator, ThisAgent, Viewer
from agents.http.context import Agent
from agents.injection.injector import Injection
from agents.problems import ApiProblem
from agents.views import fault_specs, fault_view

router = APIRouter(tags=["faults"])

FaultId = Annotated[str, Path(max_length=64, description="A fault's id, or the request_id it was injected with")]


def _allowed(agent: Agent) -> None:
    if not agent.faults:
        raise ApiProblem(
            "faults-disabled",
            f"agent of {agent.settings.node}",
            "it does not inject faults",
            "start it with --allow-faults (or allow_faults: true) on machines where faults are wanted",
        )


@router.get("/v1/fault-kinds")
async def kinds(agent: ThisAgent, _who: Viewer) -> list[FaultSpec]:
    """The catalogue, and what this machine supports of it."""
    _allowed(agent)
    return fault_specs(agent)


@router.get("/v1/faults")
async def faults(agent: ThisAgent, _who: Viewer) -> list[FaultView]:
    """Open faults, and those reverted in the last hour."""
    injector = agent.parts.injector
    return [fault_view(entry, injector) for entry in injector.entries()]


@router.post("/v1/faults")
async def inject(agent: ThisAgent, who: Chaos, wish: InjectRequest, request: Request) -> FaultView:
    """Inject. The answer comes when the fault was seen to be in force, or surely is not."""
    _allowed(agent)
    if not wish.dry_run:
        await _watched(agent)
    duration_s = wish.duration_s if "duration_s" in wish.model_fields_set else agent.settings.default_duration_s
    injection = Injection(
        kind=wish.kind,
        owner=who.name,
        duration_s=duration_s,
        nic=wish.nic or "",
        replica=wish.replica or "",
        rank=-1 if wish.rank is None else wish.rank,
        reason=wish.reason[:500],
        params=_params(wish),
        request_id=wish.request_id,
        dead_man_s=wish.dead_man_s,
        allow_last_rail=wish.allow_last_rail,
        allow_last_replica=wish.allow_last_replica,
        dry_run=wish.dry_run,
        blast=NO_LIMITS if wish.blast is None else wish.blast.limits(),
        fleet=NO_FLEET if wish.fleet is None else wish.fleet.fleet(),
        override=tuple(dict.fromkeys(wish.override or ())),
        via=_address(request.scope.get("server")),
        client=_address(request.scope.get("client")),
        protection=() if wish.protect is None else (wish.protect.protection(),),
    )
    target = "/".join(part for part in (agent.settings.node, wish.nic or wish.replica) if part)
    entry = await agent.fault_pool.call(target, "in-force", agent.parts.injector.inject, injection)
    return fault_view(entry, agent.parts.injector)


@router.get("/v1/faults/{fault}")
async def one(agent: ThisAgent, _who: Viewer, fault: FaultId) -> FaultView:
    entry = agent.parts.injector.find(fault)
    if entry is None:
        raise ApiProblem("unknown-fault", f"fault {fault}", "there is no such fault", "ftctl faults")
    return fault_view(entry, agent.parts.injector)


@router.post("/v1/faults/revert-all")
async def revert_all(agent: ThisAgent, who: Operator) -> RevertAnswer:
    """Revert all that are open. One that could not be is in the answer, with state `stuck`."""
    injector = agent.parts.injector
    thing = f"faults of {agent.settings.node}"
    entries = await agent.fault_pool.call(thing, "in-force", injector.revert_all, f"by {who.name}")
    return RevertAnswer(faults=[fault_view(entry, injector) for entry in entries])


@router.post("/v1/faults/{fault}/revert")
async def revert(agent: ThisAgent, who: Operator, fault: FaultId) -> RevertAnswer:
    """Revert one. Reverting what is reverted is no error."""
    injector = agent.parts.injector
    entry = await agent.fault_pool.call(f"fault {fault}", "in-force", injector.revert, fault, f"by {who.name}")
    return RevertAnswer(faults=[fault_view(entry, injector)])


@router.post("/v1/faults/{fault}/keepalive")
async def keepalive(agent: ThisAgent, _who: Chaos, fault: FaultId) -> FaultView:
    """The controller lives: a fault injected with `dead_man_s` goes on, up to its duration."""
    _allowed(agent)
    injector = agent.parts.injector
    entry = await agent.fault_pool.call(f"fault {fault}", "failed", injector.keep_alive, fault)
    return fault_view(entry, injector)


async def _watched(agent: Agent) -> None:
    """No fault without a watchdog."""
    if agent.kennel.pid is None:
        await agent.fault_pool.call("watchdog", "failed", agent.start_watchdog)


def _address(of: object) -> str:
    """(host, port) of a connection; empty for a Unix socket."""
    if not isinstance(of, tuple | list) or len(of) != 2 or not isinstance(of[1], int):
        return ""
    return str(of[0]).partition("%")[0].removeprefix("::ffff:")


def _params(wish: InjectRequest) -> Params:
    params: Params = {}
    for name, value in wish.params.items():
        if not isinstance(value, bool | int | float | str):
            raise ApiProblem("bad-request", f"parameter {name}", "must be a text, a number, true or false")
        params[name] = value
    return params
