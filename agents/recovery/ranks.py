"""What the ranks of this node say about themselves: the agent's end of the `FTAR_AGENT` socket.

A rank connects, says who it is (RankRegister) and reports whenever something changed and at least every second. Only
the last report counts. The connection is the registration: when it closes the rank is gone, shown as such for a moment
so that an operator sees what went, then forgotten. Nothing is sent back but what a fault asks for (`tell`), which is
not waited for, so a rank cannot be slowed down by its agent.

Whoever connects must be of this user (or root), must say who it is within HELLO_S, and is dropped at the first byte
that is not of the protocol; there are at most CONNECTIONS of them, each with a bounded buffer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.api.models import LinkView, RankView
from agents.host.errors import HostError
from agents.host.processes import start_time_of
from agents.host.workers import Armed, Worker
from agents.recovery.errors import SupervisionUnavailable
from agents.recovery.sockets import PATH_LIMIT, listen_unix, peer
from ftar_core.errors import WireError
from ftar_core.wire.agentlink import FromRank, RankRegister, RankReport, StackWay, from_rank
from ftar_core.wire.codec import FrameParser, encode
from ftar_core.wire.ids import valid_name

_LOG = logging.getLogger(__name__)

CONNECTIONS = 256
FRAME_LIMIT = 256 * 1024
HELLO_S = 5.0
GONE_S = 5.0

_Key = tuple[str, str, int]  # job, replica, rank


@dataclass
class _Connection:
    sock: socket.socket
    pid: int
    parser: FrameParser[FromRank]
    since_s: float
    key: _Key | None = None


@dataclass
class _Rank:
    register: RankRegister
    pid: int
    heard_s: float
    owner: int  # the connection's descriptor; a newer connection of the same rank takes over
    start_time: int | None  # of the process, when it registered
    report: RankReport | None = None
    gone_s: float | None = None


class RankRegistry:
    """One thread and one socket (mode 0600). Times in CLOCK_MONOTONIC seconds."""

    def __init__(self, socket_path: Path, node: str) -> None:
        self._path = socket_path
        self._node = node
        self._ranks: dict[_Key, _Rank] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connections: dict[int, _Connection] = {}

    def start(self) -> None:
        """Raises SupervisionUnavailable."""
        if len(os.fsencode(self._path)) > PATH_LIMIT:
            raise SupervisionUnavailable(
                f"ranks socket {self._path}",
                f"longer than the {PATH_LIMIT} bytes that the path of a Unix socket may have",
                hint="set ranks_socket to a shorter path",
            )
        try:
            self._listener = listen_unix(self._path, backlog=64)
        except OSError as error:
            raise SupervisionUnavailable(
                f"ranks socket {self._path}",
                error.strerror or str(error),
                hint="stop the other agent, or set ranks_socket to another path",
            ) from None
        self._inode = os.stat(self._path).st_ino
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        thread = self._thread
        if thread is None:
            return
        os.write(self._wake_w, b"w")
        thread.join()
        self._thread = None

    def views(self) -> list[RankView]:
        now = time.monotonic()
        with self._lock:
            ranks = [(key, rank) for key, rank in self._ranks.items() if not _forgotten(rank, now)]
        return [self._view(rank, now) for _, rank in sorted(ranks, key=lambda item: item[0])]

    def ways(self, replica: str) -> list[tuple[int, int, StackWay | None]]:
        """Its connected ranks: (rank, pid, how to ask for its stacks)."""
        with self._lock:
            found = [r for r in self._ranks.values() if r.register.replica == replica and r.gone_s is None]
            return sorted((r.register.rank, r.pid, r.register.stacks) for r in found)

    def workers(self) -> list[Worker]:
        """Its connected ranks, by identity."""
        with self._lock:
            return [
                Worker(rank.register.replica, rank.register.rank, rank.pid, rank.start_time)
                for rank in self._ranks.values()
                if rank.gone_s is None and rank.start_time is not None
            ]

    def tell(self, worker: Worker, message: msgspec.Struct) -> None:
        """Send a message of ftar_core/wire/agentlink.py to a rank, which need not listen. Raises HostError."""
        operation = f"tell {worker.text} something"
        with self._lock:
            known = self._known(worker)
            connection = self._connections.get(known.owner) if known is not None else None
            if known is None or connection is None:
                raise HostError(operation, 0, "it is not connected to its agent")
            data = encode(message)
            try:
                if connection.sock.send(data) != len(data):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # half a message is worse than none
                    raise HostError(operation, 0, "it does not read what it is sent")
            except OSError as error:
                raise HostError.of(operation, error) from None

    def proof(self, worker: Worker) -> int | None:
        """A descriptor of the connection that the rank made; whose it is, the kernel says. The caller closes it."""
        with self._lock:
            known = self._known(worker)
            connection = self._connections.get(known.owner) if known is not None else None
            try:
                return None if connection is None else os.dup(connection.sock.fileno())
            except OSError:
                return None  # it has just gone

    def listens(self, worker: Worker) -> bool:
        with self._lock:
            known = self._known(worker)
            return known is not None and known.register.breakpoints

    def armed(self, worker: Worker) -> Armed | None:
        with self._lock:
            known = self._known(worker)
            report = known.report if known is not None else None
            return None if report is None else Armed(report.orders, report.armed)

    def _known(self, worker: Worker) -> _Rank | None:
        """The connected rank of that process; the caller holds the lock."""
        here = (r for r in self._ranks.values() if r.gone_s is None and r.pid == worker.pid)
        return next((r for r in here if r.start_time == worker.start_time), None)

    def _view(self, rank: _Rank, now: float) -> RankView:
        register, report = rank.register, rank.report
        state = "gone" if rank.gone_s is not None else report.state if report is not None else "starting"
        return RankView(
            job=register.job,
            replica=register.replica,
            rank=register.rank,
            pid=rank.pid,
            node=self._node,
            state=state,
            step=report.step if report else 0,
            term=report.term if report else 0,
            epoch=report.epoch if report else 0,
            contributors=list(report.contributors) if report else [],
            links=[
                LinkView(
                    peer=link.peer,
                    rail=link.rail,
                    direction=link.direction,
                    state=link.state,
                    active=link.active,
                    reason=link.reason,
                    since_s=link.since_s,
                    flaps=link.flaps,
                    resumes=link.resumes,
                    bytes=link.bytes,
                )
                for link in (report.links if report and rank.gone_s is None else ())
            ],
            last_stall_ms=report.last_stall_ms if report else 0.0,
            tokens_per_s=report.tokens_per_s if report and rank.gone_s is None else 0.0,
            loss=report.loss if report else None,
            compute_ms=report.compute_ms if report else None,
            wait_ms=report.wait_ms if report else None,
            silent_s=max(0.0, now - rank.heard_s),
        )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_r, selectors.EVENT_READ)
        selector.register(self._listener, selectors.EVENT_READ)
        running = True
        while running:
            ready = selector.select(1.0 if self._connections or self._ranks else None)
            for key, _ in ready:
                if key.fd == self._wake_r:
                    running = False
                elif key.fd == self._listener.fileno():
                    self._accept(selector)
                elif key.fd in self._connections:
                    self._read(self._connections[key.fd], selector)
            self._sweep(selector)
        for connection in list(self._connections.values()):
            self._drop(connection, selector, "")
        selector.close()
        self._listener.close()
        os.close(self._wake_r)
        os.close(self._wake_w)
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _LOG.warning("%s: a rank cannot be accepted: %s", self._path, error.strerror)
            time.sleep(0.05)  # no descriptors left: they stay readable, and this must not spin
            return
        pid, uid = peer(sock)
        if uid not in (os.geteuid(), 0):
            _LOG.warning("%s: process %d of user %d was turned away", self._path, pid, uid)
            sock.close()
            return
        if len(self._connections) >= CONNECTIONS:
            _LOG.warning("%s: process %d was turned away: %d are connected already", self._path, pid, CONNECTIONS)
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock, pid, FrameParser(from_rank, FRAME_LIMIT), time.monotonic())
        self._connections[sock.fileno()] = connection
        selector.register(sock, selectors.EVENT_READ)

    def _read(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        try:
            data = connection.sock.recv(65536)
            if not data:
                self._drop(connection, selector, "")
                return
            for message in connection.parser.feed(data):
                self._take(connection, message)
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self._drop(connection, selector, str(error))

    def _take(self, connection: _Connection, message: FromRank) -> None:
        """Raises WireError for what a rank of ours would not say."""
        now = time.monotonic()
        owner = connection.sock.fileno()
        if isinstance(message, RankRegister):
            if connection.key is not None:
                raise WireError("it registered twice")
            if not (valid_name(message.job) and valid_name(message.replica) and message.rank >= 0):
                raise WireError("job, replica or rank is not a name or number of ours")
            connection.key = (message.job, message.replica, message.rank)
            pid = connection.pid or message.pid
            rank = _Rank(message, pid, now, owner, start_time_of(pid))
            with self._lock:
                self._ranks[connection.key] = rank
            return
        if connection.key is None:
            raise WireError("it reported before it registered")
        with self._lock:
            known = self._ranks.get(connection.key)
            if known is not None and known.owner == owner and known.gone_s is None:
                known.report = message
                known.heard_s = now

    def _drop(self, connection: _Connection, selector: selectors.BaseSelector, reason: str) -> None:
        owner = connection.sock.fileno()
        if reason:
            _LOG.warning("%s: process %d was dropped: %s", self._path, connection.pid, reason)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection.sock)
        self._connections.pop(owner, None)
        connection.sock.close()
        if connection.key is not None:
            with self._lock:
                known = self._ranks.get(connection.key)
                if known is not None and known.owner == owner and known.gone_s is None:
                    known.gone_s = time.monotonic()

    def _sweep(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.key is None and now - connection.since_s > HELLO_S:
                self._drop(connection, selector, f"it did not say who it is within {HELLO_S:.0f} s")
        with self._lock:
            for key in [key for key, rank in self._ranks.items() if _forgotten(rank, now)]:
                del self._ranks[key]


def _forgotten(rank: _Rank, now: float) -> bool:
    return rank.gone_s is not None and now - rank.gone_s > GONE_S
