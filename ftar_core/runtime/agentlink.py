"""What this rank tells the agent of its node: best effort, in a thread of its own, never in the way of training.

Only the latest report counts, so there is no queue: a slow or absent agent costs one kept report. Reports are sent when
they change, at most every MIN_INTERVAL_S, and repeated every REPEAT_S as a sign of life. What goes wrong on the socket
is answered by a quiet reconnect after RECONNECT_S; it is logged once, because a job without agents is a normal job.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftar_core.errors import WireError
from ftar_core.runtime.breakpoints import waiting
from ftar_core.wire.agentlink import RankRegister, RankReport, ToRank, to_rank
from ftar_core.wire.codec import FrameParser, encode

log = logging.getLogger("ftar.agentlink")
MIN_INTERVAL_S = 0.05
REPEAT_S = 1.0
RECONNECT_S = 1.0
ORDER_LIMIT = 16 * 1024  # bytes of one order
SEND_TIMEOUT_S = 1.0


class AgentLink:
    """`path` None: no agent; `report` then costs nothing. `on_order` is called in this link's thread, within REPEAT_S,
    with what the agent sends, if the agent is of this user or root; None: nothing is read."""

    def __init__(
        self, path: Path | None, register: RankRegister, on_order: Callable[[ToRank], None] | None = None
    ) -> None:
        self._path = path
        self._register = register
        self._on_order = on_order
        self._orders: FrameParser[ToRank] | None = None  # of the present connection
        self._latest: RankReport | None = None
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftar-agentlink", daemon=True)
        self._socket: socket.socket | None = None
        self._trouble = ""
        self._taken = 0  # orders, of all connections

    def start(self) -> None:
        if self._path is not None:
            self._thread.start()

    def report(self, report: RankReport) -> None:
        """Tell the agent this, soon. Thread-safe; never blocks."""
        if report != self._latest:
            self._latest = report
            self._changed.set()

    def close(self, timeout_s: float = 0.5) -> None:
        """Give the last report a moment to be sent, then stop. Idempotent."""
        self._stop.set()
        self._changed.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
            if self._socket is not None and self._latest is not None:
                self._send(self._latest)
        finally:
            self._disconnect()

    def _turn(self) -> None:
        if self._socket is None and not self._connect():
            self._stop.wait(RECONNECT_S)
            return
        self._changed.wait(REPEAT_S)
        self._changed.clear()
        latest = self._latest
        if latest is not None and not self._send(latest):
            return
        self._hear()
        self._stop.wait(MIN_INTERVAL_S)

    def _hear(self) -> None:
        if self._socket is None or self._orders is None or self._on_order is None:
            return
        try:
            waiter = select.poll()  # (a socket with a time limit waits for it, MSG_DONTWAIT or not)
            waiter.register(self._socket, select.POLLIN)
            if not waiter.poll(0):
                return
            data = self._socket.recv(ORDER_LIMIT)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the agent has closed the connection")
            for order in self._orders.feed(data):
                self._on_order(order)
                self._taken += 1
            self._changed.set()  # what waits now is told at once
        except WireError as error:
            log.warning("the agent at %s is not heard any more: %s", self._path, error)
            self._orders = None
        except OSError as error:
            self._disconnect()
            self._note(error)

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(SEND_TIMEOUT_S)
            sock.connect(str(self._path))
            sock.sendall(encode(self._register))
        except OSError as error:
            sock.close()
            self._note(error)
            return False
        self._socket = sock
        self._orders = FrameParser(to_rank, ORDER_LIMIT) if self._on_order is not None and _is_ours(sock) else None
        self._trouble = ""
        self._changed.set()  # a new agent gets the latest at once
        return True

    def _send(self, report: RankReport) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.sendall(encode(msgspec.structs.replace(report, orders=self._taken, armed=waiting())))
        except OSError as error:
            self._disconnect()
            self._note(error)
            return False
        return True

    def _note(self, error: OSError) -> None:
        text = error.strerror or str(error)
        if text != self._trouble:
            self._trouble = text
            log.info("no reports to the agent at %s: %s", self._path, text)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _is_ours(sock: socket.socket) -> bool:
    """unix(7): who listens there is of this user, or root."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (0, os.geteuid())
