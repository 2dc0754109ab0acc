"""The helper's socket: one request a connection, read within a time, answered, closed.

Who is at the other end the kernel says (SO_PEERCRED, unix(7)); nobody but the agent's user is heard, and nobody else
can even connect: the socket is that user's, with mode 0600, in a directory that only root can write to.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.helper import wire
from agents.helper.audit import HelperAudit
from agents.helper.settings import HelperProblem, unsafe
from agents.recovery.sockets import PATH_LIMIT, listen_unix, peer
from ftar_core.errors import WireError
from ftar_core.wire.codec import LENGTH, FrameParser, encode

CONNECTIONS = 32
REQUEST_S = 3.0  # a request is there within so long
REPLY_S = 5.0
RDHUP = 0x2000  # POLLRDHUP, poll(2); Python has no name for it on all versions

Answer = Callable[[wire.AnyRequest, Callable[[], bool], frozenset[int]], wire.AnyReply]


class HelperServer:
    """`open` binds, before rights are given up; `serve` returns when `stop` was called."""

    def __init__(self, path: Path, agent_uid: int) -> None:
        self._path, self._agent_uid = path, agent_uid
        self._audit: HelperAudit
        self._answer: Answer
        self._complain: Callable[[str], None]
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._listener: socket.socket | None = None
        self._stop_r, self._stop_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._complained_s = -60.0

    def open(self) -> None:
        """Raises HelperProblem."""
        where = self._path
        if len(os.fsencode(where)) > PATH_LIMIT:
            raise HelperProblem(f"socket {where}: longer than the {PATH_LIMIT} bytes of a Unix socket's path")
        try:
            if not where.parent.exists():
                where.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                os.chmod(where.parent, 0o755)  # noqa: S103 - whatever the umask is; one that was there is not ours to change
            if bad := unsafe(where.parent):
                raise HelperProblem(f"socket {where}: {bad}")
            self._own(os.geteuid())  # root may not be let in by its name alone (no CAP_DAC_OVERRIDE)
            try:
                self._listener = listen_unix(where, backlog=CONNECTIONS)
            finally:
                self._own(self._agent_uid)
        except OSError as error:
            raise HelperProblem(f"socket {where}: {error.strerror}") from None

    def _own(self, uid: int) -> None:
        """Whose the socket is, if there is one. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                os.chown(self._path, uid, -1, follow_symlinks=False)

    def serve(
        self, answer: Answer, complain: Callable[[str], None], every: Callable[[], None], audit: HelperAudit
    ) -> None:
        """`complain` hears of what was turned away, at most once a second; `every` is called about every two."""
        self._answer, self._complain, self._audit = answer, complain, audit
        listener = self._listener
        assert listener is not None  # noqa: S101 - `open` came before
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._stop_r, select.POLLIN)
        called_s = time.monotonic()
        while True:
            ready = {fd for fd, _event in poll.poll(2000)}
            if self._stop_r in ready:
                break
            if listener.fileno() in ready:
                self._accept(listener)
            if time.monotonic() - called_s >= 2.0:
                called_s = time.monotonic()
                every()

    def stop(self) -> None:
        """From a signal handler too."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._stop_w, b"x")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            self._say(f"a connection cannot be accepted: {error.strerror}")
            time.sleep(0.05)  # no descriptors left: it stays readable, and this must not spin
            return
        pid, uid = peer(sock)
        if uid != self._agent_uid:
            if self._say(f"process {pid} of user {uid} was turned away: only user {self._agent_uid} is heard"):
                self._audit.turned_away((pid, uid), f"only user {self._agent_uid} is heard")
            _send(sock, wire.Refused("refused", "ft-agent-helper", f"user {uid} is not heard here"), 0.0)
            sock.close()
            return
        if not self._places.acquire(blocking=False):
            self._say(f"process {pid} was turned away: {CONNECTIONS} requests are open")
            _send(sock, wire.Refused("failed", "ft-agent-helper", "too many requests are open", "try again"), 0.0)
            sock.close()
            return
        try:
            threading.Thread(target=self._one, args=(sock, (pid, uid)), name="request", daemon=True).start()
        except RuntimeError:
            self._places.release()
            sock.close()

    def _one(self, sock: socket.socket, caller: tuple[int, int]) -> None:
        try:
            with sock:
                try:
                    request, proven = _read(sock)
                except WireError as error:
                    self._say(f"a request was turned away: {error}")
                    hint = "install the same ftctl for agent and helper"
                    _send(sock, wire.Refused("bad-request", "ft-agent-helper", str(error)[:500], hint), REPLY_S)
                    return
                except OSError:
                    return  # nobody is there any more, or nothing came
                begun = time.monotonic()
                reply = self._carry_out(sock, request, proven)
                self._audit.answered(request, reply, caller, time.monotonic() - begun)
                _send(sock, reply, REPLY_S)
        finally:
            self._places.release()

    def _carry_out(self, sock: socket.socket, request: wire.AnyRequest, proven: frozenset[int]) -> wire.AnyReply:
        try:
            return self._answer(request, lambda: _gone(sock), proven)
        except Exception as error:  # noqa: BLE001 - a bug must be told, not end the only one who can undo
            self._say(f"a bug ({type(error).__name__}: {error})")
            reason = f"a bug in the helper ({type(error).__name__}); its journal says more"
            return wire.Refused("in-force", "ft-agent-helper", reason, "ftctl faults")

    def _say(self, text: str) -> bool:
        """Not more than once a second: a stranger must not fill the journal. Whether it was said."""
        now = time.monotonic()
        if now - self._complained_s < 1.0:
            return False
        self._complained_s = now
        self._complain(text)
        return True


def _read(sock: socket.socket) -> tuple[wire.AnyRequest, frozenset[int]]:
    """The request, and the processes at the other ends of connections that came along. Raises WireError, OSError."""
    parser = FrameParser(wire.asked, wire.REQUEST_LIMIT)
    until = time.monotonic() + REQUEST_S
    passed: list[int] = []
    try:
        while True:
            sock.settimeout(max(0.01, until - time.monotonic()))
            data, more, _flags, _from = socket.recv_fds(sock, 65536, wire.PROOFS, socket.MSG_CMSG_CLOEXEC)
            passed += more
            if not data or time.monotonic() > until:
                raise OSError(0, "it ended early")
            found = parser.feed(data)
            if len(passed) > wire.PROOFS:
                raise WireError(f"more than {wire.PROOFS} descriptors came along")
            if found:
                if found[0].version != wire.VERSION:
                    raise WireError(f"the agent speaks version {found[0].version}, this helper {wire.VERSION}")
                if len(found) > 1 or parser.begun:
                    raise WireError("more than one request on a connection")
                return found[0].request, frozenset(filter(None, map(_other_end, passed)))
    finally:
        for one in passed:
            os.close(one)


def _other_end(descriptor: int) -> int:
    """The process that made this connection, as the kernel noted it then, if it still holds it; 0: there is none.

    Of a connection that the agent made itself the kernel would name whoever listens there. That end is told by the name
    of its peer: one that listens has a name, one that connects, as a rank does, has none.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family != socket.AF_UNIX or sock.getpeername() or _gone(sock):
                return 0
            return peer(sock)[0]
    except OSError:
        return 0  # no socket at all


def _send(sock: socket.socket, reply: wire.AnyReply, timeout_s: float) -> None:
    try:
        data = encode(reply)
        if len(data) - LENGTH.size > wire.REPLY_LIMIT:
            data = encode(wire.Refused("failed", "ft-agent-helper", "the answer is too long", "ftctl faults"))
        sock.settimeout(timeout_s)
        sock.sendall(data)
    except (OSError, msgspec.MsgspecError):
        pass  # it does not read, or is gone; what was done stands in the ledger


def _gone(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, RDHUP)
    return bool(poll.poll(0))
