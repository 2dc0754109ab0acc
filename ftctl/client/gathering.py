"""What an incident report needs, asked of everybody: pieces of text, the most telling first, and who did not answer."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from agents.api.models import FaultView, LinksAnswer
from ftctl.client import events
from ftctl.client.agent import AgentClient
from ftctl.client.cluster import Agents, Snapshot
from ftctl.client.problems import find
from ftctl.config import Inventory
from ftctl.errors import AgentRefused, AgentUnreachable, CliError
from ftctl.render import document
from ftctl.render.events import document as event_document

# Routes that an agent may have or not, by its version and what it was started with.
OPTIONAL = {"health": "/v1/health", "audit": "/v1/audit", "policy": "/v1/policy"}
LOGS = "agents do not serve log files: status.json has their paths, and events.jsonl what they said"


@dataclass(frozen=True)
class Piece:
    """`text`, or why there is none: `error`. `absent`: it was not to be expected."""

    name: str
    source: str
    text: str = ""
    error: CliError | None = None
    absent: str = ""


def steps(nodes: int) -> int:
    """How many pieces `gather` yields at most, for a progress bar."""
    return 5 + nodes * (3 + len(OPTIONAL)) + 1


async def gather(agents: Agents, earliest: float, version: str) -> AsyncIterator[Piece]:
    """Pieces as they come. A source that does not answer costs its pieces and no more."""
    inventory = agents.inventory
    names = [node.name for node in inventory.nodes]
    snapshot = await agents.snapshot()
    yield Piece("status.json", "all agents", _json(document.status(snapshot, find(snapshot))))
    for node in snapshot.nodes:
        if node.error is not None:
            yield Piece(f"nodes/{node.name}", f"agent of {node.name}", error=node.error)
    yield _of_coordinator(snapshot)
    yield await _events(agents, names, earliest)
    yield Piece("versions.json", "this machine and all agents", _json(_versions(snapshot, version)))
    yield Piece("inventory.json", inventory.source, _json(_inventory(inventory)))
    silent = {node.name for node in snapshot.nodes if isinstance(node.error, AgentUnreachable)}
    names = [name for name in names if name not in silent]
    async for piece in _each(agents, names, "faults.json", AgentClient.faults, _faults):
        yield piece
    async for piece in _each(agents, names, "links.json", _links, _link_rows):
        yield piece
    async for piece in _each(agents, names, "metrics.txt", AgentClient.metrics, str):
        yield piece
    for name, path in OPTIONAL.items():
        async for piece in _each(agents, names, f"{name}.json", _raw(path), str):
            yield piece
    yield Piece("logs", "all agents", absent=LOGS)


async def _each(
    agents: Agents,
    names: list[str],
    file: str,
    ask: Callable[[AgentClient], Awaitable[object]],
    shown: Callable[..., str],
) -> AsyncIterator[Piece]:
    for node, answer in (await agents.each(ask, names)).items():
        name, source = f"nodes/{node}/{file}", f"agent of {node}"
        if isinstance(answer, AgentRefused) and answer.error_code == "not-found":
            yield Piece(name, source, absent="this agent has no such route")
        elif isinstance(answer, CliError):
            yield Piece(name, source, error=answer)
        else:
            yield Piece(name, source, shown(answer))


def _raw(path: str) -> Callable[[AgentClient], Awaitable[str]]:
    async def ask(client: AgentClient) -> str:
        return await client.text(path)

    return ask


async def _links(client: AgentClient) -> LinksAnswer:
    return await client.links(rail="", state="", pid=None, each=False)


def _link_rows(answer: LinksAnswer) -> str:
    return answer.model_dump_json(indent=1)


def _faults(answer: list[FaultView]) -> str:
    return _json({"schema": document.SCHEMA, "faults": [fault.model_dump(mode="json") for fault in answer]})


def _of_coordinator(snapshot: Snapshot) -> Piece:
    """Its view of the job: epoch, members, stalls, settings and the account of the job's time."""
    name, source = "job.json", "coordinator"
    if snapshot.job is not None:
        return Piece(name, source, snapshot.job.model_dump_json(indent=1))
    if snapshot.needs_no_coordinator() or snapshot.finished():
        return Piece(name, source, absent=document.REASONS[document.without_coordinator(snapshot)])
    return Piece(name, source, error=snapshot.job_error)


async def _events(agents: Agents, names: list[str], earliest: float) -> Piece:
    found, errors = await events.everything(agents, names, coordinator=True)
    lines = [document.as_line(event_document(event)) for event in found if event.time >= earliest]
    text = "".join(f"{line}\n" for line in lines)
    lost = [error for error in errors if not isinstance(error, AgentUnreachable)]  # those are told of already
    return Piece("events.jsonl", "all agents and the coordinator", text, error=lost[0] if lost else None)


def _versions(snapshot: Snapshot, version: str) -> dict[str, object]:
    return {
        "ftctl": version,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "agents": {view.name: view.agent.version for view in snapshot.views()},
    }


def _inventory(inventory: Inventory) -> dict[str, object]:
    """Names and addresses; of the token only that there is one."""
    return {
        "job": inventory.job,
        "environment": inventory.environment,
        "ca_file": str(inventory.ca_file) if inventory.ca_file is not None else None,
        "nodes": [{"name": node.name, "url": node.url} for node in inventory.nodes],
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=1)
