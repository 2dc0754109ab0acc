"""A real ft-agent-helper for a test, and requests to it by any user; no process of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from live_agent import until, write

from agents.helper import wire
from agents.helper.client import HelperGone, ask

AGENT_UID, STRANGER_UID = 65534, 65533


class LiveHelper:
    """Under /tmp with a directory that only root can write to, because pytest's own are too long for a socket."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.socket = root / "run" / "helper.sock"
        self.state = root / "state"
        self.config = root / "helper.yaml"
        self.log = root / "log"
        self.settings = {
            "node": "node1",
            "agent_user": AGENT_UID,
            "socket": str(self.socket),
            "state_dir": str(self.state),
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._pids: set[int] = set()

    def start(self, wait: bool = True, through: tuple[str, ...] = ()) -> LiveHelper:
        """`through`: a command that starts the one behind it in its own place."""
        write(self.config, self.settings)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*through, sys.executable, "-m", "agents.helper", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        started = f"helper.started node1: pid {self.process.pid},"
        if wait:
            until(lambda: started in self.text() or self.ended(), "the helper starts", 60.0)
            assert started in self.text(), self.text()
        return self

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def watchdogs(self) -> list[int]:
        """By their command line, which names this helper's directory."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    if b"agents.injection.watchdog" in words and str(self.state).encode() in words:
                        found.append(int(entry))
        return found

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def close(self) -> None:
        for pid in self.watchdogs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait(60)

    def ask(self, request: wire.AnyRequest, uid: int = AGENT_UID, proofs: tuple[int, ...] = ()) -> wire.AnyReply:
        data = as_user(uid, lambda: msgspec.msgpack.encode(ask(self.socket, request, 20.0, proofs)))
        return wire.reply.decode(data)

    def faults(self) -> dict[str, str]:
        """Fault id -> state."""
        found = self.ask(wire.Look())
        assert isinstance(found, wire.Faults)
        return {one.entry.id: one.entry.state.value for one in found.faults}


def as_user(uid: int, work: Callable[[], bytes]) -> bytes:
    """What `work` returns in a child process of that user, without groups. HelperGone comes through."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                data = b"+" + work()
            except HelperGone as error:
                data = (b"s" if error.sent else b"-") + str(error).encode()
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(data)
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    assert data, "the child failed"
    if data[:1] != b"+":
        raise HelperGone(data[1:].decode(), sent=data[:1] == b"s")
    return data[1:]


@contextmanager
def live_helper(**settings: Any) -> Iterator[LiveHelper]:
    root = Path(tempfile.mkdtemp(prefix="ft-helper-"))
    root.chmod(0o755)
    helper = LiveHelper(root, **settings)
    try:
        yield helper
    finally:
        helper.close()
        shutil.rmtree(root, ignore_errors=True)
