"""The agent's side of the fork server: find the one that runs, else start one, and notice when it is gone.

Everything here is asynchronous: requests are sent, answers come in later through `tick`, because the server spends
seconds with imports first and the supervisor has processes to watch meanwhile. A server that an earlier agent started
is taken over if it would do the same as a new one (same interpreter, imports and network namespace); else it is
retired, which leaves its children running and their ends recorded.

A server that dies before it is ready twice in a row is started without imports: some module crashes it, and then
replicas should fail each by itself, with their own logs, rather than not be started at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import agents
from agents.host.processes import Handle, start_time_of
from agents.host.signals import held_back
from agents.recovery import logs
from agents.recovery.records import (
    MESSAGE_LIMIT,
    PROTOCOL,
    Children,
    Exit,
    FromServer,
    List,
    NotSpawned,
    Ready,
    Retire,
    Spawn,
    Spawned,
    ToServer,
    from_server,
    netns_inode,
)
from agents.recovery.sockets import named, peer
from ftar_core.errors import WireError
from ftar_core.wire.codec import FrameParser, encode

IMPORT_DEADLINE_S = 600.0  # imports on a busy machine take a minute; a server that takes ten hangs
ANSWER_DEADLINE_S = 10.0  # a fork takes milliseconds
_IDLE_S = 60.0
_CONNECT_EVERY_S = 0.02
_ASK_EVERY_S = 0.2
_SEND_S = 1.0
_RECONNECT_S = 5.0
_RETRY_S = (0.0, 0.5, 2.0, 10.0, 30.0)  # before the n-th start in a row
_CRASHES_WITHOUT_IMPORTS = 2


class Phase(str, Enum):
    ABSENT = "absent"  # none runs; the next is started at `_next`
    CONNECTING = "connecting"  # started, does not listen yet
    IMPORTING = "importing"  # connected, not ready yet
    READY = "ready"


class ForkClient:
    """Not thread-safe: belongs to the supervisor's thread. `emit(kind, object, reason)` tells the operator."""

    def __init__(
        self,
        directory: Path,
        preload: tuple[str, ...],
        node: str,
        emit: Callable[[str, str, str], None],
    ) -> None:
        self.directory = directory
        self.socket_path = directory / "fork.sock"
        self.log_path = directory / "log"
        self._preload = preload
        self._node = node
        self._emit = emit
        self.phase = Phase.ABSENT
        self.ready: Ready | None = None
        self.exits: dict[tuple[str, int], Exit] = {}
        self._sock: socket.socket | None = None
        self._parser: FrameParser[FromServer] = FrameParser(from_server, MESSAGE_LIMIT)
        self._started: subprocess.Popen[bytes] | None = None
        self._retired: list[subprocess.Popen[bytes]] = []  # servers with children left, to be reaped by this process
        self._handle: Handle | None = None
        self._crashes = 0
        self._next = 0.0
        self._deadline = 0.0
        self._ask_after = 0.0
        self._looked = False  # for a server of an earlier agent
        self._unanswered: dict[str, float] = {}  # name -> when its answer must be there

    # --- for the supervisor -------------------------------------------------------------------------------------------

    @property
    def note(self) -> str:
        """What a replica that waits for this server should say."""
        if self.phase is Phase.ABSENT:
            return "waiting for its fork server to be started again"
        names = ", ".join(self._imports()) or "nothing"
        return f"its fork server is importing {names}"

    def tick(self, now: float) -> list[Spawned | NotSpawned | Children]:
        """Go on with whatever is due; returns the answers that came in. `now` in CLOCK_MONOTONIC seconds."""
        answers: list[Spawned | NotSpawned | Children] = []
        if self.phase is Phase.ABSENT and now >= self._next:
            self._begin(now)
        elif self.phase is Phase.CONNECTING:
            self._open(now)
        if self.phase in (Phase.IMPORTING, Phase.READY):
            answers = self._receive()
        self._check(now)
        return answers

    def wait_s(self, now: float) -> float:
        """Seconds until tick must be called again, if nothing becomes readable before."""
        if self.phase is Phase.ABSENT:
            return max(0.0, self._next - now)
        if self.phase is Phase.CONNECTING:
            return _CONNECT_EVERY_S
        return 1.0

    def spawn(self, request: Spawn) -> bool:
        """True if it was sent. Its answer comes from tick; if none comes in time the server is given up."""
        if not self._send(request):
            return False
        self._unanswered[request.name] = time.monotonic() + ANSWER_DEADLINE_S
        return True

    def ask_children(self, now: float) -> None:
        """Have `exits` filled, at most every 0.2 s: for ends that the server could not write down."""
        if now >= self._ask_after:
            self._ask_after = now + _ASK_EVERY_S
            self._send(List())

    def descriptors(self) -> list[int]:
        """Readable when tick has something to do."""
        found = [self._sock.fileno()] if self._sock is not None else []
        return found + ([self._handle.fd] if self._handle is not None and self._handle.fd is not None else [])

    def close(self, *, retire: bool, wait_s: float = 2.0) -> None:
        """Leave the server to the next agent, or retire it and wait for its end."""
        if retire and not self._looked:
            self._looked = True
            self._open(time.monotonic())  # an earlier agent's
        if retire and self._started is not None and self.phase is not Phase.READY:
            self._started.kill()  # still importing: it has no children
        elif retire:
            self._send(Retire())
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        handle = self._handle
        if retire and handle is not None:
            end = time.monotonic() + wait_s
            while not (handle.ended() and not self._retired) and time.monotonic() < end:
                time.sleep(0.01)
                self._reap()
        self._reap()
        for server in (self._started, *self._retired):
            if server is not None:
                server.returncode = 0  # it is meant to outlive this process; keeps Popen from warning about it
        self._started = None
        self._drop_handle()
        self.phase = Phase.ABSENT

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Take over the server that runs, else start one."""
        if not self._looked:
            self._looked = True
            if self._open(now):
                return
        self._launch(now)

    def _launch(self, now: float) -> None:
        package = Path(agents.__file__ or "").resolve().parent.parent
        argv = [sys.executable, "-m", "agents.recovery.forkserver", "--socket", str(self.socket_path)]
        argv += ["--preload", ",".join(self._imports()), "--path", os.getcwd(), "--idle-s", str(_IDLE_S)]
        env = dict(os.environ)
        if "PYTHONPATH" in env:  # it starts in the directory of this package, so that no namesake of it is imported
            env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in env["PYTHONPATH"].split(os.pathsep))
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = logs.open_log(self.log_path)
            try:
                with held_back():
                    self._started = subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=package,
                        env=env,
                        start_new_session=True,
                        close_fds=True,
                    )
            finally:
                os.close(log)
        except OSError as error:
            self._lost(now, f"it cannot be started: {error}")
            return
        pid = self._started.pid
        self._handle = Handle.open(pid, start_time_of(pid) or 0)
        self.phase = Phase.CONNECTING
        self._deadline = now + IMPORT_DEADLINE_S

    def _open(self, now: float) -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(1.0)
            with named(self.socket_path) as name:
                sock.connect(name)
            pid, uid = peer(sock)
            if uid not in (os.geteuid(), 0):
                raise PermissionError(f"{self.socket_path} belongs to user {uid}")
        except OSError:
            sock.close()
            return False
        sock.setblocking(False)
        self._sock = sock
        self._parser = FrameParser(from_server, MESSAGE_LIMIT)
        if self._handle is None:
            self._handle = Handle.open(pid, start_time_of(pid) or 0)
        self.phase = Phase.IMPORTING
        self._deadline = now + IMPORT_DEADLINE_S
        return True

    def _receive(self) -> list[Spawned | NotSpawned | Children]:
        answers: list[Spawned | NotSpawned | Children] = []
        sock = self._sock
        try:
            while sock is not None:
                data = sock.recv(65536)
                if not data:
                    raise ConnectionResetError("it closed the connection")
                for message in self._parser.feed(data):
                    if isinstance(message, Ready):
                        if not self._greet(message):
                            return answers
                        continue
                    if isinstance(message, Children):
                        self.exits = {(c.name, c.life.life): c.exit for c in message.children if c.exit is not None}
                    else:
                        self._unanswered.pop(message.name, None)
                    answers.append(message)
                    if isinstance(message, NotSpawned) and message.retiring:
                        self._replace(message.reason)
                        return answers
        except BlockingIOError:
            pass
        except WireError as error:
            self._lost(time.monotonic(), str(error))
        except OSError:
            self._reconnect(time.monotonic())
        return answers

    def _reconnect(self, now: float) -> None:
        """The connection broke. If the server is alive it knows exit codes and is worth another one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._unanswered.clear()
        self.phase = Phase.CONNECTING
        self._deadline = now + _RECONNECT_S

    def _greet(self, ready: Ready) -> bool:
        """Use this server, or retire it and start another."""
        mine = (PROTOCOL, sys.executable, self._imports(), netns_inode())
        if self._started is None and (ready.protocol, ready.python, ready.preload, ready.netns) != mine:
            self._send(Retire())
            self.socket_path.unlink(missing_ok=True)  # now, and not when the old one gets to it
            self._replace("it was started for other imports or another network")
            return False
        self.ready = ready
        self.phase = Phase.READY
        self._crashes = 0
        for problem in ready.problems:
            self._emit(
                "forkserver.import-failed", self._node, f"could not import {problem}; replicas import it themselves"
            )
        if ready.threads > 1:
            reason = f"imports started {ready.threads - 1} threads, so replicas start from a new interpreter (slower)"
            self._emit("forkserver.threads", self._node, reason)
        self._send(List())
        return True

    def _replace(self, reason: str) -> None:
        """Leave this server to its children and start another."""
        self._emit("forkserver.retired", self._node, f"{reason}; another one is started, running replicas go on")
        self._disconnect()
        if self._started is not None:
            self._retired.append(self._started)
            self._started = None
        self.phase, self._next = Phase.ABSENT, 0.0

    def _check(self, now: float) -> None:
        if self.phase is Phase.ABSENT:
            return
        self._reap()
        if self._handle is None or self._handle.ended():
            self._lost(now, "it ended")
        elif self.phase is not Phase.READY and now >= self._deadline:
            self._lost(now, "it did not become ready in time")
        elif any(now >= deadline for deadline in self._unanswered.values()):
            self._lost(now, f"it did not answer for {ANSWER_DEADLINE_S:.0f} s")

    def _lost(self, now: float, reason: str) -> None:
        """It is of no use any more. What is left of it is killed, so that it cannot start something later."""
        early = self.ready is None
        self._crashes = self._crashes + 1 if early else 0
        self._kill()
        delay = _RETRY_S[min(self._crashes, len(_RETRY_S) - 1)]
        self.phase, self._next = Phase.ABSENT, now + delay
        lines = logs.tail(self.log_path, lines=3) if early else []
        text = (
            f"{reason}; replicas go on, their exit codes are not known"
            if not early
            else f"{reason} before it was ready"
        )
        if early and self._crashes == _CRASHES_WITHOUT_IMPORTS:
            text += "; it is started without imports from now on"
        self._emit(
            "forkserver.lost", self._node, text + (f" (log {self.log_path}: {' | '.join(lines)})" if lines else "")
        )

    def _kill(self) -> None:
        if self._handle is not None and not self._handle.ended():
            with contextlib.suppress(PermissionError):
                self._handle.send(signal.SIGKILL)
            end = time.monotonic() + 1.0
            while not self._handle.ended() and time.monotonic() < end:
                time.sleep(0.005)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._reap()
        self._drop_handle()
        self.ready = None
        self._unanswered.clear()

    def _imports(self) -> tuple[str, ...]:
        return () if self._crashes >= _CRASHES_WITHOUT_IMPORTS else self._preload

    def _send(self, message: ToServer) -> bool:
        if self._sock is None:
            return False
        try:
            self._sock.settimeout(_SEND_S)
            self._sock.sendall(encode(message))
            self._sock.setblocking(False)
        except OSError:
            return False  # tick finds out why
        return True

    def _drop_handle(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _reap(self) -> None:
        self._retired = [server for server in self._retired if server.poll() is None]
        if self._started is not None and self._started.poll() is not None:
            self._started = None
