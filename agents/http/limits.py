"""Bounds on what a client may send: 64 KiB of body, complete within ten seconds."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agents.api.models import ErrorBody
from agents.http.errors import answer

MAX_BODY_BYTES = 64 * 1024
BODY_S = 10.0


class TooMuch(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class BodyLimit:
    """ASGI middleware: reads the body before the application sees the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive)
        except TooMuch as error:
            refusal = ErrorBody(code="bad-request", thing="request", reason=str(error))
            await answer(refusal, error.status)(scope, receive, send)
            return
        if body is None:
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()  # the disconnect
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None if the client went away."""
    body = bytearray()
    deadline = time.monotonic() + BODY_S
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > MAX_BODY_BYTES:
        raise TooMuch(413, f"a body may have {MAX_BODY_BYTES} bytes")
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.01, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise TooMuch(408, f"the body did not arrive within {BODY_S:g} s") from None
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise TooMuch(413, f"a body may have {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return bytes(body)
