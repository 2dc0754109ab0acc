"""Commands of the operator's that a rule runs: Slurm, Kubernetes, a pager. Each is ended after its time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

MAX_RUNNING = 4
KILL_S = 2.0  # SIGTERM to SIGKILL


class Hooks:
    """Thread-safe. Nothing waits for a hook."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def run(
        self, argv: Sequence[str], environment: Mapping[str, str], timeout_s: float, done: Callable[[str], None]
    ) -> str:
        """Why it was not started; else empty, and `done` is called later with why it failed (empty: it did not)."""
        with self._lock:
            if self._closed:
                return "the agent ends"
            if len(self._running) >= MAX_RUNNING:
                return f"{MAX_RUNNING} hooks are running"
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                return f"{argv[0]}: {getattr(error, 'strerror', None) or error}"
            self._running.add(process)
        threading.Thread(target=self._watch, args=(process, timeout_s, done), name="hook", daemon=True).start()
        return ""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left = list(self._running)
        for process in left:
            _signal(process, signal.SIGKILL)

    def _watch(self, process: subprocess.Popen[bytes], timeout_s: float, done: Callable[[str], None]) -> None:
        started = time.monotonic()
        try:
            code = process.wait(timeout_s)
            failure = "" if code == 0 else f"it was ended by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
            _signal(process, signal.SIGKILL)  # also what it has started
            process.wait()
            failure = f"it hung, and was ended after {time.monotonic() - started:.1f} s"
        with self._lock:
            self._running.discard(process)
        done(failure)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To its whole session. The number cannot be another's before it was waited for; a group may outlive its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
