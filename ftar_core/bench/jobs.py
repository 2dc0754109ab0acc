"""A job of a benchmark: the real coordinator, and replicas forked from a process with torch imported (forking.py).

Everything of it ends with the benchmark, also when that is killed. What happened is in the job's directory: `journal/`,
the coordinator's `store/events.jsonl`, a log of each process.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ftar_core.bench.nodes import Node
from ftar_core.bench.report import BenchError
from ftar_core.wire.messages import JobView
from ftar_core.wire.operator import OperatorClient

NAME = "bench"
START_S = 60.0
RAILS = "a=127.0.0.1,b=127.0.0.2"
# One machine carries the whole job: who is only late must not be taken for dead. The death of a process is seen by its
# connections, which needs no such patience.
PATIENT = ("--evict-after", "30s", "--suspect-after", "15s", "--hung-after", "120s", "--max-evictions", "0")
FORKING = "ftar_core.bench.forking"


class Parent:
    """The process that forks replicas which run `module` (its `main(options)`), for one job after the other.
    `prepared`: what the module's `prepare()` said there."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._node = Node("the parent of the replicas", 0, {}, module=FORKING)
        try:
            self.prepared: Any = self._node.ask("preload", module=module)
        except BaseException:
            self._node.kill()
            raise

    def fork(self, options: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> int:
        more = {"options": dict(options), "environment": dict(environment), "log": str(log)}
        return int(self._node.ask("fork", module=self.module, **more))

    def ended(self) -> dict[int, int]:
        """Process id -> exit code, since the last look."""
        return {int(pid): code for pid, code in self._node.ask("ended").items()}

    def end(self, pids: Sequence[int]) -> None:
        self._node.ask("end", pids=list(pids))

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._node.kill()


class Job:
    """`with Job(directory, parent, replicas=3) as job: job.start("r0", options)`; `directory` exists, and is the job's
    own. BenchError: something has ended that should not have, with its last words."""

    def __init__(self, directory: Path, parent: Parent, *, replicas: int, settings: Sequence[str] = PATIENT) -> None:
        self.directory, self._parent = directory, parent
        self.journals = directory / "journal"
        self.journals.mkdir()
        self.pids: dict[str, int] = {}  # of replicas that run
        self.codes: dict[str, int] = {}  # of the last life of those that do not
        self._tokens = {name: secrets.token_hex(16) for name in ("token", "operator")}
        for name, token in self._tokens.items():
            file = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as out:
                out.write(token)
        self._log = directory / "coordinator.log"
        self._port = 0
        self._operator: OperatorClient | None = None
        given = [
            *("--job", NAME, "--replicas", str(replicas), "--new", "--store", str(directory / "store")),
            *("--token-file", str(directory / "token"), "--operator-token-file", str(directory / "operator")),
            *("--listen", "127.0.0.1:0", "--port-file", str(directory / "port"), *settings),
        ]
        with self._log.open("ab") as log:
            self.coordinator = subprocess.Popen(
                [sys.executable, "-m", "ftar_core.bench.commit_coordinator", str(os.getpid()), *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("FTAR_")},
            )
        try:
            self._await_port(directory / "port")
        except BaseException:
            self.close()
            raise

    def _await_port(self, file: Path) -> None:
        deadline = time.monotonic() + START_S
        while not file.exists():
            if self.coordinator.poll() is not None:
                raise BenchError(f"the coordinator has ended: {last_words(self._log)}")
            if time.monotonic() > deadline:
                raise BenchError(f"the coordinator does not listen after {START_S:.0f} s")
            time.sleep(0.01)
        self._port = int(file.read_text())

    # --- replicas

    def start(self, replica: str, options: Mapping[str, Any], **environment: str) -> None:
        """A life of this replica; `environment`: more FTAR_* variables."""
        settings = {
            "FTAR_COORDINATOR": f"127.0.0.1:{self._port}",
            "FTAR_JOB": NAME,
            "FTAR_REPLICA": replica,
            "FTAR_TOKEN_FILE": str(self.directory / "token"),
            "FTAR_RAILS": RAILS,
            "FTAR_NODE": f"node-{replica}",
            "FTAR_JOURNAL": str(self.journals),
            **environment,
        }
        self.codes.pop(replica, None)
        self.pids[replica] = self._parent.fork({"replica": replica, **options}, settings, self.log_of(replica))

    def log_of(self, replica: str) -> Path:
        return self.directory / f"{replica}.log"

    def look(self) -> list[str]:
        """Replicas that have ended since the last look; their exit codes are in `codes`."""
        if self.coordinator.poll() not in (None, 0):
            raise BenchError(f"the coordinator has ended: {last_words(self._log)}")
        gone: list[str] = []
        for pid, code in self._parent.ended().items():
            for replica in [name for name, its in self.pids.items() if its == pid]:
                del self.pids[replica]
                self.codes[replica] = code
                gone.append(replica)
        return gone

    # --- the operator

    def operator(self) -> OperatorClient:
        if self._operator is None:
            token = self._tokens["operator"].encode()
            self._operator = OperatorClient("127.0.0.1", self._port, NAME, token, "bench", timeout_s=30.0)
        return self._operator

    def view(self) -> JobView:
        seen = self.operator().request("status").job
        if seen is None:
            raise BenchError("the coordinator says nothing about its job")
        return seen

    # --- the end

    def close(self) -> None:
        """End what still runs."""
        if self._operator is not None:
            self._operator.close()
        if self.coordinator.poll() is None:
            self.coordinator.kill()
        self.coordinator.wait()
        with suppress(BenchError):  # it is gone, and so are they
            self._parent.end(list(self.pids.values()))
        self.pids.clear()
        for name in self._tokens:
            (self.directory / name).unlink(missing_ok=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def last_words(log: Path) -> str:
    """The last line of a log."""
    try:
        said = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        said = []
    return said[-1] if said else "without a word"
