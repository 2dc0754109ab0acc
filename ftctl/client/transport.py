"""HTTP/1.1 to one agent: asyncio's streams under h11, and nothing in between.

httpx's own transport costs 2 ms of CPU a request (it looks for other event loops each time), which is seconds where a
thousand agents are asked. Connections are kept for the next request, unless there are more agents than descriptors to
spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import h11
import httpx

READ_BYTES = 64 * 1024
MAX_IDLE = 2
STARTED = "http11.send_request_headers.started"  # as httpcore calls it


class AgentTransport(httpx.AsyncBaseTransport):
    """`socket`: a path; else `host` and `port`, with TLS if there is a `context`. Raises httpx.TransportError."""

    def __init__(self, *, socket: str | None, host: str, port: int, context: ssl.SSLContext | None, keep: bool) -> None:
        self._socket = socket
        self._host = host
        self._port = port
        self._context = context
        self._keep = keep
        self._idle: list[_Connection] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = await self._connection(request)
        try:
            trace = request.extensions.get("trace")
            if trace is not None:
                await trace(STARTED, {})
            await connection.send(request)
            head = await connection.head(request)
        except BaseException:
            connection.close()
            raise
        return httpx.Response(head.status_code, headers=list(head.headers), stream=_Body(self, connection, request))

    async def aclose(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def give_back(self, connection: _Connection) -> None:
        if self._keep and len(self._idle) < MAX_IDLE and connection.again():
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self, request: httpx.Request) -> _Connection:
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
            raise httpx.ConnectError(str(error), request=request) from error
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

    async def send(self, request: httpx.Request) -> None:
        body = request.content
        try:
            head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
            data = self._http.send(head) or b""
            if body:
                data += self._http.send(h11.Data(data=body)) or b""
            data += self._http.send(h11.EndOfMessage()) or b""
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error
        self._writer.write(data)
        # What an agent that closes early has to say is in its answer.
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def head(self, request: httpx.Request) -> h11.Response:
        while True:
            event = await self.event(request)
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)

    async def event(self, request: httpx.Request) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    reason = "Server disconnected without sending a response."
                    raise httpx.RemoteProtocolError(reason, request=request)
                self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        except OSError as error:
            raise httpx.ReadError(str(error), request=request) from error
        return event


class _Body(httpx.AsyncByteStream):
    def __init__(self, transport: AgentTransport, connection: _Connection, request: httpx.Request) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None:
            event = await self._connection.event(self._request)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise httpx.RemoteProtocolError("the answer is cut short", request=self._request)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)
