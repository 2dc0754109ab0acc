"""The node: alive, view, events, fault kinds, metrics, the contract itself."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from agents.api.models import Alive, EventsAnswer, LinksAnswer, NodeView
from agents.http import metrics
from agents.http.auth import ThisAgent, Viewer
from agents.http.context import VERSION, Agent
from agents.problems import ApiProblem
from agents.views import node_view
from ftar_core.wire.messages import OpReply

MAX_WAIT_S = 30.0
MAX_WAITERS = 64
ACCOUNT_S = 1.0  # that /metrics waits for the coordinator

router = APIRouter()
_waiting = 0


@router.get("/healthz", tags=["node"])
async def healthz(agent: ThisAgent) -> Alive:
    """Is the agent alive? The only route without a token."""
    return Alive(ok=True, node=agent.settings.node, version=VERSION)


@router.get("/v1/node", tags=["node"])
async def node(agent: ThisAgent, _who: Viewer) -> NodeView:
    """Everything this agent knows about its node."""
    return node_view(agent)


@router.get("/v1/links", tags=["node"])
def links(  # noqa: PLR0917
    agent: ThisAgent,
    _who: Viewer,
    pid: Annotated[int | None, Query(ge=1)] = None,
    rail: Annotated[str, Query(max_length=64)] = "",
    state: Annotated[str, Query(max_length=16)] = "",
    each: bool = False,
    limit: Annotated[int, Query(ge=1, le=20_000)] = 2000,
) -> LinksAnswer:
    """The links of the processes on this node: by peer and rail, or each connection. On a thread: there may be many."""
    rows = agent.links.rows(pid=pid, rail=rail, state=state, each=each)
    return LinksAnswer(links=rows[:limit], left_out=max(0, len(rows) - limit))


@router.get("/v1/events", tags=["node"])
async def events(
    agent: ThisAgent,
    _who: Viewer,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0,
) -> EventsAnswer:
    """Events after a number; with `wait_s`, waits so long for the first one."""
    answer = agent.events.after(after, limit)
    # A number from before the agent's restart is above ours: answer at once, `boot` tells the reader.
    if answer.events or wait_s == 0 or after > agent.events.last:
        return answer
    await _wait(agent, after, wait_s)
    return agent.events.after(after, limit)


async def _wait(agent: Agent, after: int, wait_s: float) -> None:
    global _waiting
    if _waiting >= MAX_WAITERS:
        raise ApiProblem("failed", "events", f"{_waiting} clients are waiting already", "ask without wait_s")
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(happened.set)
        except RuntimeError:
            pass  # the loop has ended with the agent

    agent.events.listen(tell)
    _waiting += 1
    try:
        if agent.events.last <= after:
            await asyncio.wait_for(happened.wait(), wait_s)
    except asyncio.TimeoutError:
        pass
    finally:
        _waiting -= 1
        agent.events.unlisten(tell)


@router.get("/metrics", tags=["node"], response_class=Response)
async def prometheus(agent: ThisAgent, _who: Viewer) -> Response:
    """Prometheus text."""
    return Response(metrics.render(agent, await _saved(agent)), media_type=metrics.CONTENT_TYPE)


async def _saved(agent: Agent) -> OpReply | None:
    """Where the job's time went, and its checkpoints; None if the coordinator does not say so at once: the rest is
    worth having."""
    if agent.settings.coordinator is None:
        return None
    reader = f"agent-{agent.settings.node}"

    async def read() -> OpReply | None:
        return await agent.job_pool.call("coordinator", "coordinator", agent.relay.saved, reader)

    try:
        return await asyncio.wait_for(agent.account_reads.read(read), ACCOUNT_S)
    except (asyncio.TimeoutError, ApiProblem):
        return None


@router.get("/openapi.json", tags=["node"], include_in_schema=False)
async def openapi(request: Request, _who: Viewer) -> dict[str, Any]:
    """This contract as OpenAPI 3.1."""
    schema: dict[str, Any] = request.app.openapi()
    return schema
