"""Keeps one watchdog beside this agent, and starts another if it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from agents.host.errors import HostError
from agents.host.signals import held_back

CHECK_S = 2.0


class Kennel:
    """`start` raises HostError. The watchdog outlives this process: it is not a daemon thread's child to be reaped.
    `whose`: what people call this process, "agent" or "helper"."""

    def __init__(self, state_dir: Path, whose: str = "agent") -> None:
        self._state_dir = state_dir
        self._whose = whose
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start one if there is none. Its words, should it have any, go where ours go."""
        with self._lock:
            if self.pid is not None:
                return
            try:
                own = os.pidfd_open(os.getpid())
            except OSError as error:
                raise HostError.of("start the watchdog (pidfd_open)", error) from None
            try:
                with held_back():
                    self._process = subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "agents.injection.watchdog",
                            "--state-dir",
                            str(self._state_dir.resolve()),
                            "--agent-fd",
                            str(own),
                            "--whose",
                            self._whose,
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=(own,),
                        start_new_session=True,
                        cwd="/",
                    )
            except OSError as error:
                raise HostError.of("start the watchdog", error) from None
            finally:
                os.close(own)

    def close(self, timeout_s: float = 3.0) -> None:
        """End it, when nothing is in force any more. Else leave it alone: it goes on when we are gone."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
