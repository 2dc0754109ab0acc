"""The job: the coordinator's view and events, and what operators ask of it; and the replica processes of this node."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from fastapi import APIRouter, Path, Query

from agents.api.models import (
    ActionAnswer,
    CoordinatorAction,
    EventsAnswer,
    JobState,
    ReplicaAction,
    SupervisionAction,
)
from agents.http.auth import Operator, ThisAgent, Viewer
from agents.http.context import Agent
from agents.problems import ApiProblem
from ftar_core.wire.ids import valid_name

router = APIRouter(tags=["job"])

Replica = Annotated[str, Path(max_length=64)]


class Verb(str, Enum):
    START = "start"
    STOP = "stop"
    RESTART = "restart"
    REJOIN = "rejoin"


@router.get("/v1/job")
async def job(agent: ThisAgent, _who: Viewer) -> JobState:
    """The coordinator's view of the job."""
    return await agent.job_reads.read(lambda: _read(agent))


@router.get("/v1/job/events")
async def job_events(
    agent: ThisAgent,
    _who: Viewer,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
) -> EventsAnswer:
    reader = f"agent-{agent.settings.node}"
    return await agent.job_pool.call("coordinator", "coordinator", agent.relay.events, reader, after, limit)


@router.post("/v1/job/replicas/{replica}/drain")
async def drain(agent: ThisAgent, who: Operator, replica: Replica, wish: ReplicaAction) -> ActionAnswer:
    """Leave at a step boundary, with nothing lost."""
    _check(replica, wish.reason, "drain")
    return await agent.job_pool.call(f"replica {replica}", "coordinator", agent.replicas.drain, who.name, replica, wish)


@router.post("/v1/job/replicas/{replica}/evict")
async def evict(agent: ThisAgent, who: Operator, replica: Replica, wish: ReplicaAction) -> ActionAnswer:
    """Remove at once."""
    _check(replica, wish.reason, "evict")
    return await agent.job_pool.call(f"replica {replica}", "coordinator", agent.replicas.evict, who.name, replica, wish)


@router.post("/v1/job/replicas/{replica}/rejoin")
async def rejoin(agent: ThisAgent, who: Operator, replica: Replica, wish: ReplicaAction) -> ActionAnswer:
    """Come back; if this agent supervises the replica, it also starts it."""
    _check(replica, wish.reason or "-", "rejoin")
    return await agent.job_pool.call(
        f"replica {replica}", "coordinator", agent.replicas.rejoin, who.name, replica, wish
    )


@router.post("/v1/job/force-quorum")
async def force_quorum(agent: ThisAgent, who: Operator, wish: CoordinatorAction) -> ActionAnswer:
    """Go on without members that a restarted coordinator still waits for; their incarnations are revoked."""
    return await _coordinate(agent, who.name, "force-quorum", wish)


@router.post("/v1/job/finish")
async def finish(agent: ThisAgent, who: Operator, wish: CoordinatorAction) -> ActionAnswer:
    """End the job with the running step."""
    return await _coordinate(agent, who.name, "finish", wish)


@router.post("/v1/replicas/{replica}/{verb}")
async def supervise(
    agent: ThisAgent, who: Operator, replica: Replica, verb: Verb, wish: SupervisionAction
) -> ActionAnswer:
    """Start, stop or restart the processes of a replica that this agent supervises. `rejoin` is what the other nodes of
    a replica are told when it comes back: a start, also where the drained process has not quite ended."""
    _check(replica, wish.reason, verb.value)
    reason = f"{wish.reason} (by {who.name})"
    return await agent.job_pool.call(
        f"replica {replica}", "failed", agent.replicas.supervise, verb.value, replica, reason
    )


async def _read(agent: Agent) -> JobState:
    reader = f"agent-{agent.settings.node}"
    return await agent.job_pool.call("coordinator", "coordinator", agent.relay.state, reader)


async def _coordinate(agent: Agent, principal: str, op: str, wish: CoordinatorAction) -> ActionAnswer:
    if not wish.reason.strip():
        raise ApiProblem("bad-request", op, "a reason is required", "--reason TEXT")
    return await agent.job_pool.call(
        "coordinator", "coordinator", agent.relay.act, principal, op, wish.reason, dry_run=wish.dry_run
    )


def _check(replica: str, reason: str, verb: str) -> None:
    if not valid_name(replica):
        raise ApiProblem("unknown-replica", f"replica {replica}", "not a replica's name", "ftctl status lists them")
    if not reason.strip():
        raise ApiProblem("bad-request", f"{verb} of replica {replica}", "a reason is required", "--reason TEXT")
