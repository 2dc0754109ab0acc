"""ASGI middleware: every request for a change, carried out or refused, is in the audit log before it is answered.

A POST that changes nothing, or comes every second, is left out (UNTOLD). An answer waits for the log at most LOG_S: a
disk that hangs must not keep a revert from being answered.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from fastapi import APIRouter, Query
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agents.api.audit import AuditAnswer, AuditRecord
from agents.http.auth import AGENT, ThisAgent, Viewer
from agents.http.context import Agent

router = APIRouter(tags=["node"])
LOG_S = 1.0
UNTOLD = ("/keepalive", "/stacks", "/v1/verdicts")  # ends of paths
MAX_REASON, MAX_TEXT, MAX_KEYS = 500, 200, 24


@router.get("/v1/audit")
async def audit(
    agent: ThisAgent,
    _who: Viewer,
    since: float = Query(default=0.0, ge=0, allow_inf_nan=False),
    limit: int = Query(default=1000, ge=1, le=5000),
) -> AuditAnswer:
    """Requests for changes, carried out or refused: who, from where, what, why, result."""
    return await agent.audit_pool.call("audit log", "failed", agent.audit.read, since, limit)


class Audited:
    """Inside of BodyLimit, which has read the body by then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith(UNTOLD):
            await self._app(scope, receive, send)
            return
        agent: Agent = scope.get(AGENT) or scope["app"].state.agent
        asked, came = bytearray(), time.time()
        started = time.monotonic()
        held: list[Message] = []

        async def hear() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def hold(message: Message) -> None:
            held.append(message)

        try:
            await self._app(scope, hear, hold)
        finally:
            record = _record(agent, scope, bytes(asked), held)
            record = record.model_copy(update={"time": came, "ms": round(1000 * (time.monotonic() - started), 1)})
            await _write(agent, record)
        for message in held:
            await send(message)


async def _write(agent: Agent, record: AuditRecord) -> None:
    try:
        trouble = await asyncio.wait_for(
            asyncio.shield(agent.audit_pool.call("audit log", "failed", agent.audit.add, record)), LOG_S
        )
    except Exception as error:  # noqa: BLE001 - the log must not take an answer away
        trouble = f"the audit log hangs ({type(error).__name__})"
    if trouble:
        agent.events.emit("audit.failed", agent.settings.node, trouble)


def _record(agent: Agent, scope: Scope, asked: bytes, held: list[Message]) -> AuditRecord:
    body, answer = _mapping(asked), _mapping(b"".join(m.get("body", b"") for m in held))
    status = next((m["status"] for m in held if m["type"] == "http.response.start"), 0)
    action, target = _action(scope["path"])
    target = target or "/".join(str(body[key]) for key in ("nic", "replica", "gpu") if body.get(key) is not None)
    client = scope.get("client")
    why = body.get("reason", "")
    return AuditRecord(
        time=0.0,
        node=agent.settings.node,
        who=_who(agent, scope),
        source=client[0] if client and client[0] else "unix socket",
        action=action,
        target=target[:MAX_TEXT],
        why=" ".join(why.split())[:MAX_REASON] if isinstance(why, str) else "",
        asks=_bounded({key: value for key, value in body.items() if key not in ("reason", "request_id")}),
        result="ok" if status == 200 else str(answer.get("code", "unknown"))[:MAX_TEXT],
        detail=_detail(status, answer),
    )


def _action(path: str) -> tuple[str, str]:
    """What is asked for, and of what, by the path: ("drain", "r1"). /v1/faults is the one that has no verb."""
    parts = path.removeprefix("/v1/").strip("/").split("/")
    if parts == ["faults"]:
        return "inject", ""
    return parts[-1][:64], parts[-2] if len(parts) > 2 else ""


def _who(agent: Agent, scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    word, _, token = given.partition(" ")
    principal = agent.tokens.whose(token.strip()) if word.lower() == "bearer" and token else None
    return principal.name if principal is not None else ""


def _detail(status: int, answer: dict[str, Any]) -> str:
    if status != 200:
        return str(answer.get("reason", ""))[:MAX_REASON]
    faults = answer.get("faults", [answer])
    named = [f"{f['id']} {f.get('state', '')}" for f in faults if isinstance(f, dict) and "id" in f]
    return ", ".join(named)[:MAX_REASON] or str(answer.get("text", ""))[:MAX_REASON]


def _bounded(body: dict[str, Any]) -> dict[str, Any]:
    """Flat, short, and without null, so that a line stays a line."""
    kept: dict[str, Any] = {}
    for key, value in list(body.items())[:MAX_KEYS]:
        if isinstance(value, bool | int | float):
            kept[key[:64]] = value
        elif value not in (None, "", [], {}):
            kept[key[:64]] = (value if isinstance(value, str) else json.dumps(value))[:MAX_TEXT]
    return kept


def _mapping(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
