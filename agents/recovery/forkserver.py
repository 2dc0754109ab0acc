"""A process that imports once and forks replicas from then on: `python -m agents.recovery.forkserver --socket PATH`.

Importing torch takes seconds, on a busy machine tens of them, and a replica that restarts should not pay it again. This
process imports the modules named by `--preload`, then sleeps until an agent asks for a replica (records.Spawn) and
forks. It is the parent, so it alone learns exit codes: it writes life.json before the child may run and exit.json after
reaping it, so that neither depends on the agent being alive. It belongs to no agent; the next one finds it by its
socket.

Forking is safe only from a process with one thread: a lock held by another thread would stay locked for ever in the
child. So there are no threads here; if a pre-imported module started some, children execute a new interpreter instead
(slower, and said so in Ready). Objects made before the first fork are frozen (gc.freeze), so that the child's collector
does not touch, and thereby copy, the pages they share.

When a child ends, whatever it left in its session is killed while it is still a zombie: its number is taken until then,
so the session's id cannot mean another one. A replica lives and dies whole.

A module that was edited after it was imported must not go on being used: before each fork the source files are compared
with what they were, and if one changed the server retires, so that the agent starts another. (Two thousand stat(2)s.)

It ends when retired and childless, or after `--idle-s` with neither agent nor child. SIGTERM retires it. If it is
killed its children go on as orphans, but nobody will know their exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from agents.host.processes import start_time_of
from agents.host.signals import let_through
from agents.recovery import child
from agents.recovery.forks import Forks, Job, say
from agents.recovery.preloaded import Preloaded
from agents.recovery.records import (
    MESSAGE_LIMIT,
    PROTOCOL,
    FromServer,
    List,
    NotSpawned,
    Ready,
    Retire,
    Spawn,
    Spawned,
    ToServer,
    netns_inode,
    to_server,
)
from agents.recovery.sockets import listen_unix, peer
from ftar_core.errors import WireError
from ftar_core.wire.codec import FrameParser, encode
from ftar_core.wire.exits import RankExit

_CONNECTIONS = 8  # one agent, and one that is just taking over
_SEND_S = 2.0  # an agent that does not read its answers is dropped
_RETRY_S = 1.0  # for exit.json on a full disk


@dataclass
class Connection:
    sock: socket.socket
    parser: FrameParser[ToServer]


class ForkServer:
    def __init__(self, path: Path, preload: tuple[str, ...], idle_s: float) -> None:
        self._preload = preload
        self._idle_s = idle_s
        self._forks = Forks()
        self._connections: dict[int, Connection] = {}
        self._retired = False
        self._path = path
        self._listener = listen_unix(path, backlog=_CONNECTIONS)
        self._inode = os.stat(path).st_ino
        self._ready: Ready | None = None
        self._preloaded: Preloaded | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def import_modules(self) -> None:
        """Import what children will need, then hold the collector still."""
        self._preloaded = imported = Preloaded(self._preload)
        threads = len(os.listdir("/proc/self/task"))
        self._forks.fresh = threads > 1
        pid = os.getpid()
        self._ready = Ready(
            protocol=PROTOCOL,
            pid=pid,
            start_time=start_time_of(pid) or 0,
            python=sys.executable,
            preload=imported.names,
            netns=netns_inode(),
            threads=threads,
            import_s=imported.seconds,
            problems=imported.problems,
        )
        gc.collect()
        gc.disable()
        gc.freeze()
        say(f"ready: {len(imported.names)} modules in {imported.seconds:.1f} s, {threads} threads")
        for problem in imported.problems:
            say(f"could not import {problem}")

    def serve(self) -> Job | None:
        """Returns None when this server is to end, or, in a forked child, the child's job."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._retire())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        let_through()
        self._selector.register(self._wake, selectors.EVENT_READ)
        if not self._retired:
            self._selector.register(self._listener, selectors.EVENT_READ)
        idle_since = time.monotonic()
        while self._forks.there or not self._retired:
            now = time.monotonic()
            if self._forks.there or self._connections:
                idle_since = now
            elif now - idle_since >= self._idle_s:
                say(f"no agent and no child for {self._idle_s:.0f} s: exiting")
                break
            timeout = _RETRY_S if self._forks.unsaved else max(0.05, idle_since + self._idle_s - now)
            for key, _ in self._selector.select(timeout):
                job = self._handle(key.fd)
                if job is not None:
                    return job
            self._forks.reap()
            self._forks.save()
        self._unlink()
        return None

    def abandon(self) -> None:
        """In a child: close everything of the server's, through its owners, so that no number is closed twice."""
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()
        self._wake.close()
        self._waker.close()

    def _retire(self) -> None:
        if not self._retired:
            self._retired = True
            self._unlink()

    def _unlink(self) -> None:
        # The path may by now be another server's.
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    # --- connections --------------------------------------------------------------------------------------------------

    def _handle(self, fd: int) -> Job | None:
        if fd == self._wake.fileno():
            with contextlib.suppress(BlockingIOError):
                while self._wake.recv(4096):
                    pass
            return None
        if fd == self._listener.fileno():
            self._accept()
            return None
        connection = self._connections.get(fd)
        if connection is None:
            return None
        try:
            data = connection.sock.recv(65536)
            if not data:
                self._drop(connection)
                return None
            for message in connection.parser.feed(data):
                job = self._answer(connection, message)
                if job is not None:
                    return job
        except WireError as error:
            say(f"dropped a connection: {error}")
            self._drop(connection)
        except OSError:
            self._drop(connection)
        return None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        _, uid = peer(sock)
        if uid not in (os.geteuid(), 0) or len(self._connections) >= _CONNECTIONS or self._retired:
            sock.close()
            return
        sock.settimeout(_SEND_S)
        connection = Connection(sock, FrameParser(to_server, MESSAGE_LIMIT))
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ)
        if self._ready is not None:
            with contextlib.suppress(OSError):
                sock.sendall(encode(self._ready))

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _answer(self, connection: Connection, message: ToServer) -> Job | None:
        reply: FromServer
        if isinstance(message, List):
            reply = self._forks.all()
        elif isinstance(message, Retire):
            self._retire()
            return None
        else:
            answer = self._spawn(message)
            if isinstance(answer, Job):
                return answer
            reply = answer
        # An agent that left after asking still meant what it said next: a failed answer is noticed at the next read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sock.sendall(encode(reply))
        return None

    def _spawn(self, request: Spawn) -> Job | Spawned | NotSpawned:
        life = self._forks.life_of(request.name)
        if life is not None:
            return Spawned(name=request.name, life=life)
        edited = "" if self.fresh or self._preloaded is None else self._preloaded.edited()
        if self._retired or edited:
            reason = f"{edited} changed since it was imported" if edited else "it was asked to end"
            say(f"retiring: {reason}")
            self._retire()
            return NotSpawned(name=request.name, life=request.life, reason=reason, retiring=True)
        return self._forks.spawn(request)

    @property
    def fresh(self) -> bool:
        """Children execute a new interpreter: what was imported has started threads."""
        return self._forks.fresh

    def _not(self, request: Spawn, reason: str) -> NotSpawned:
        say(f"{request.name}: {reason}")
        return NotSpawned(name=request.name, life=request.life, reason=reason)


def _be_child(server: ForkServer, job: Job) -> object:
    try:
        os.setsid()
        server.abandon()
        if os.read(job.go, 1) != b"g":
            os._exit(int(RankExit.RESTART))  # the server went before it could record this process
        os.close(job.go)
        child.become(job.request, job.log)
        if server.fresh:
            child.execute(job.request)
    except OSError as error:
        os.write(2, f"this process could not be set up: {error}\n".encode())
        os._exit(int(RankExit.RESTART))
    try:
        return child.run_module(job.request)
    except Exception as error:  # noqa: BLE001 - the end of the line for the user's script
        child.report(type(error), error, error.__traceback__)
        return 1


def main(argv: list[str] | None = None) -> object:
    parser = argparse.ArgumentParser(
        prog="python -m agents.recovery.forkserver", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on (mode 0600)")
    parser.add_argument("--preload", default="", help="modules to import before any fork, separated by commas")
    parser.add_argument("--path", action="append", default=[], help="a directory to look for modules in, last")
    parser.add_argument("--idle-s", type=float, default=60.0, help="exit after so long with neither agent nor child")
    args = parser.parse_args(argv)
    sys.path.extend(entry for entry in args.path if entry not in sys.path)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2:
            with contextlib.suppress(OSError):
                os.close(fd)
    with contextlib.suppress(PermissionError):
        os.setsid()
    # OpenBLAS, which torch loads with numpy, starts its threads when it is loaded, which would rule out forking. Only
    # numpy's linear algebra in replicas is single-threaded for it; torch on CPUs brings its own.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    preload = tuple(name for name in args.preload.split(",") if name)
    try:
        server = ForkServer(args.socket, preload, args.idle_s)
    except OSError as error:
        say(f"cannot listen on {args.socket}: {error}")
        return 1
    server.import_modules()
    job = server.serve()
    return None if job is None else _be_child(server, job)


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]  # what a training script returns means what it means to sys.exit
