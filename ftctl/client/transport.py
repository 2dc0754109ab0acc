"""HTTP/1.1 to one agent: asyncio's streams under h11, and nothing in between.

A general client costs ten times the CPU of the request itself (it parses the address again for each, looks for other
event loops, for cookies, proxies and authentication), which is seconds where a thousand agents are asked. Connections
are kept for the next request, unless there are more agents than descriptors to spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11

READ_BYTES = 64 * 1024
MAX_IDLE = 2


class NoAnswer(Exception):
    """There was no whole answer; the message says why, or its cause does."""


class TooLarge(Exception):
    """The answer has more bytes than are wanted."""


@dataclass(frozen=True)
class Request:
    """`target`: path and query, in ASCII."""

    method: str
    target: str
    body: bytes = b""


class AgentTransport:
    """`socket`: a path; else `host` and `port`, with TLS if there is a `context`. `headers` go with every request."""

    def __init__(
        self,
        *,
        socket: str | None,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        keep: bool,
        headers: list[tuple[str, str]],
    ) -> None:
        self._socket = socket
        self._host = host
        self._port = port
        self._context = context
        self._keep = keep
        self._headers = headers
        self._idle: list[_Connection] = []

    async def ask(self, request: Request, *, limit: int, started: Callable[[], None]) -> tuple[int, bytes]:
        """Status and body of at most `limit` bytes. `started` is called before the first byte is sent: from then on the
        request may have been carried out. Raises NoAnswer, TooLarge."""
        connection = await self._connection()
        try:
            started()
            await connection.send(request, self._headers)
            answer = await connection.answer(limit)
        except BaseException:
            connection.close()
            raise
        if self._keep and len(self._idle) < MAX_IDLE and connection.again():
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive():
                return connection
            connection.close()
        try:
            if self._socket is not None:
                streams = await asyncio.open_unix_connection(self._socket)
            else:
                name = self._host if self._context is not None else None
                streams = await asyncio.open_connection(self._host, self._port, ssl=self._context, server_hostname=name)
        except OSError as error:  # ssl.SSLError is one
            raise NoAnswer(str(error)) from error
        return _Connection(*streams)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    def alive(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    def again(self) -> bool:
        """True if the next request may use it."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return self.alive()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._writer.transport.abort()

    async def send(self, request: Request, headers: list[tuple[str, str]]) -> None:
        if request.body:
            headers = [*headers, ("content-type", "application/json"), ("content-length", str(len(request.body)))]
        elif request.method != "GET":
            headers = [*headers, ("content-length", "0")]
        try:
            head = h11.Request(method=request.method, target=request.target, headers=headers)
            data = self._http.send(head) or b""
            if request.body:
                data += self._http.send(h11.Data(data=request.body)) or b""
            data += self._http.send(h11.EndOfMessage()) or b""
        except h11.LocalProtocolError as error:
            raise NoAnswer(str(error)) from error
        self._writer.write(data)
        # What an agent that closes early has to say is in its answer.
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def answer(self, limit: int) -> tuple[int, bytes]:
        while isinstance(event := await self._event(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise NoAnswer("it closed the connection without an answer")
        status, body = event.status_code, bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > limit:
                raise TooLarge
        if not isinstance(event, h11.EndOfMessage):
            raise NoAnswer("the answer is cut short")
        return status, bytes(body)

    async def _event(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise NoAnswer("it closed the connection without an answer")
                self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise NoAnswer(str(error)) from error
        except OSError as error:
            raise NoAnswer(str(error)) from error
        return event
