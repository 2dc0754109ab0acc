"""The benchmark's end of stable.py: start processes, hear of their ends, kill them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ftar_core.bench.report import BenchError

IMPORT_S = 300.0
ANSWER_S = 30.0


def _environment() -> dict[str, str]:
    """Without settings of a job that this is not, and without a proxy between the replicas."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTAR_", "TORCHFT_"))}
    return {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")} | {"OMP_NUM_THREADS": "1"}


class End(NamedTuple):
    name: str
    pid: int
    code: int  # negative: the signal


class Forks:
    """`logs`: where what the processes say goes, a file each. `keep`: file descriptors that they need."""

    def __init__(self, logs: Path, keep: Sequence[int]) -> None:
        self.logs = logs
        self.alive: dict[str, int] = {}  # name -> process id
        self._ended: list[End] = []
        self._started: dict[str, int] = {}
        self._buffer = b""
        self._words = (logs / "stable.log").open("ab")
        plan = json.dumps({"parent": os.getpid()})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ftar_core.bench.peers.stable", plan],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            pass_fds=list(keep),
            env=_environment(),
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError("no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout
        deadline = time.monotonic() + IMPORT_S
        try:
            while not self._read(deadline):
                pass
        except BaseException:
            self.close()
            raise

    def _read(self, deadline: float) -> list[dict[str, Any]]:
        """The next lines; waits for some until then. BenchError: it has ended, or is silent."""
        ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BenchError("the process that starts the replicas does not answer")
        more = os.read(self._out.fileno(), 1 << 16)
        if not more:
            raise BenchError(f"the process that starts the replicas has ended: {self.last_words('stable')}")
        *lines, self._buffer = (self._buffer + more).split(b"\n")
        return [json.loads(line) for line in lines]

    def _take(self, said: list[dict[str, Any]]) -> None:
        for line in said:
            if "started" in line:
                self._started[line["started"]] = line["pid"]
            elif "exit" in line:
                if self.alive.get(line["id"]) == line["pid"]:
                    del self.alive[line["id"]]
                self._ended.append(End(line["id"], line["pid"], line["exit"]))

    def start(self, name: str, role: str, **more: Any) -> int:
        request = {"start": name, "role": role, "log": str(self.logs / f"{name}.log"), **more}
        self._started.pop(name, None)
        self._in.write(json.dumps(request).encode() + b"\n")
        self._in.flush()
        deadline = time.monotonic() + ANSWER_S
        while name not in self._started:
            self._take(self._read(deadline))
        pid = self._started[name]
        if not any(end.pid == pid for end in self._ended):
            self.alive[name] = pid
        return pid

    def ended(self) -> list[End]:
        """Those that have ended since the last call."""
        while select.select([self._out], [], [], 0)[0]:
            self._take(self._read(time.monotonic() + 1))
        ended, self._ended = self._ended, []
        return ended

    def signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self.alive[name], number)

    def kill(self, names: Sequence[str]) -> None:
        """And wait until they are gone."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        deadline = time.monotonic() + ANSWER_S
        while any(name in self.alive for name in names):
            self._take(self._read(deadline))

    def last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = (self.logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "without a word"
        return "without a word"

    def close(self) -> None:
        """Everything that was started ends with it."""
        for name in self.alive:
            self.signal(name, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._out.close()
        self._words.close()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
