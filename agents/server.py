"""The agent's listening sockets: a Unix socket and, if wanted, TCP with TLS off loopback.

uvicorn serves them; one server a socket, because TLS is on for one and off for the other. Its own signal handling and
ten wakeups a second are left out: an agent at rest should sleep. A client that connects and does not finish its request
headers within five seconds is dropped (uvicorn has no such bound of its own).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from agents.recovery.sockets import PATH_LIMIT, listen_unix
from agents.settings import AgentSettings
from ftar_core.wire.address import Address, parse_address

HEADERS_S = 5.0
BACKLOG = 128
CONCURRENCY = 256
SHUTDOWN_S = 3


class ServerProblem(Exception):
    """The agent cannot listen as configured; the message names the setting and the reason."""


class BoundedHttp(H11Protocol):
    """HTTP/1.1 with a bound on how long the headers of a request may take."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The clock runs from the first byte (or the connection) until the headers are complete."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADERS_S, self._give_up)

    def _unwatch(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """One listening socket; ends when `stop` is called."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._stop.wait()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()


class Listeners:
    """Sockets opened at once, so that what is wrong with them is said before anything else starts."""

    def __init__(self, settings: AgentSettings) -> None:
        """Raises ServerProblem."""
        self._settings = settings
        self._unix: socket.socket | None = None
        self._tcp: socket.socket | None = None
        self.tcp_address: Address | None = None
        if settings.unix_socket is None and settings.listen is None:
            raise ServerProblem("listen, unix_socket: at least one of the two is needed")
        try:
            if settings.listen is not None:
                self._tcp = _listen_tcp(settings)
                self.tcp_address = Address(*self._tcp.getsockname()[:2])
            if settings.unix_socket is not None:
                self._unix = _listen_unix(settings.unix_socket)
        except BaseException:
            self.close()
            raise

    async def serve(self, app: FastAPI, stop: asyncio.Event) -> None:
        """Until `stop` is set, and then until running requests are answered (at most SHUTDOWN_S)."""
        servers = []
        if self._tcp is not None:
            servers.append((server_for(app, self._settings, tls=self._settings.tls_cert is not None), self._tcp))
        if self._unix is not None:
            servers.append((server_for(app, self._settings, tls=False), self._unix))
        running = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in servers]
        await stop.wait()
        for server, _sock in servers:
            server.stop()
        await asyncio.gather(*running)

    def close(self) -> None:
        for sock in (self._tcp, self._unix):
            if sock is not None:
                sock.close()
        if self._unix is not None and self._settings.unix_socket is not None:
            with contextlib.suppress(OSError):
                self._settings.unix_socket.unlink()


class _NotAll(logging.Filter):
    """Strangers' junk is told of, but not more than once a second: nobody from outside is to fill the journal."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now = time.monotonic()
        if now - self._said_s < 1.0:
            return False
        self._said_s = now
        return True


_LOG = logging.getLogger("uvicorn.error")
_LOG.addFilter(_NotAll())


def server_for(app: ASGIApp, settings: AgentSettings, *, tls: bool) -> _Server:
    """Serves one listening socket, until its `stop` is called."""
    return _Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=CONCURRENCY,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=SHUTDOWN_S,
            ssl_certfile=str(settings.tls_cert) if tls and settings.tls_cert else None,
            ssl_keyfile=str(settings.tls_key) if tls and settings.tls_key else None,
        )
    )


def _listen_unix(path: Path) -> socket.socket:
    try:
        return listen_unix(path, backlog=BACKLOG)
    except OSError as error:
        if len(os.fsencode(path)) > PATH_LIMIT:
            raise ServerProblem(f"unix_socket {path}: longer than {PATH_LIMIT} bytes") from None
        words = {errno.EADDRINUSE: "somebody listens there already", errno.EEXIST: "something else is there"}
        reason = words.get(error.errno or 0, error.strerror)
        raise ServerProblem(f"unix_socket {path}: {reason}") from None


def _listen_tcp(settings: AgentSettings) -> socket.socket:
    try:
        host, port = parse_address(settings.listen or "", any_port=True)
        family, _kind, _proto, _name, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (ValueError, OSError) as error:
        raise ServerProblem(f"listen {settings.listen}: {error}") from None
    _check_tls(settings, str(where[0]))
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        words = {errno.EADDRINUSE: "somebody listens there already", errno.EADDRNOTAVAIL: "no such address here"}
        raise ServerProblem(f"listen {settings.listen}: {words.get(error.errno or 0, error.strerror)}") from None
    return sock


def _check_tls(settings: AgentSettings, address: str) -> None:
    """Tokens must not travel in the clear."""
    cert, key = settings.tls_cert, settings.tls_key
    if (cert is None) != (key is None):
        raise ServerProblem("tls_cert, tls_key: both or none are needed")
    if cert is None or key is None:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            reason = "not a loopback address: tokens would travel in the clear; set tls_cert and tls_key"
            raise ServerProblem(f"listen {settings.listen}: {reason}")
        return
    try:
        if stat.S_IMODE(key.stat().st_mode) & 0o007:
            raise ServerProblem(f"tls_key {key}: everybody may read or write it; run: chmod 600 {key}")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ServerProblem(
            f"tls_cert {cert}, tls_key {key}: not a certificate with its key ({error.reason})"
        ) from None
    except OSError as error:
        raise ServerProblem(f"tls_cert {cert}, tls_key {key}: {error.strerror}") from None
