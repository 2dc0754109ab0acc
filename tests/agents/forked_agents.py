"""Agents that were forked rather than started anew (agent_zygote.py), as if they were subprocess.Popen's."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Zygote:
    """The one of this process. It ends with it, at the end of its input."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("agent_zygote.py")), "--ends"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def ask(self, wish: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(wish), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())


@functools.cache
def zygote() -> Zygote:
    return Zygote()


class ForkedAgent:
    """In the calling thread's network namespace, with this process's environment."""

    def __init__(self, config: Path, arguments: tuple[str, ...], log: Path) -> None:
        namespace = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
        told = {"config": str(config), "arguments": arguments, "log": str(log), "environment": dict(os.environ)}
        self.pid = zygote().ask({"namespace": namespace, **told})
        self._pidfd: int | None = os.pidfd_open(self.pid)  # it is there at least as a zombie
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("ft-agent", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, timeout_s: float | None) -> int | None:
        if self._pidfd is not None and select.select([self._pidfd], [], [], timeout_s)[0]:
            os.close(self._pidfd)
            self._pidfd = None
            self.returncode = zygote().ask({"ended": self.pid})
        return self.returncode
