"""A job for a test: a real coordinator process, real replicas in processes of their own, all ended afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from ports import claim_port

from ftar_core.wire.operator import OperatorClient

from . import sharded
from .trainer import Recipe, run

TOKEN, OPERATOR_TOKEN = "training-test-token-1", "training-test-operator-token"
DEADLINE_S = 90.0
FORKS = multiprocessing.get_context("forkserver")
# An optimizer imports torch._dynamo when the first one is made: seconds, in every replica.
FORKS.set_forkserver_preload(
    [
        "ftar_core.training.session",
        "ftar_core.training.checkpoints.keeper",
        "ftar_core.training.checkpoints.restoring",
        "torch._dynamo",
        "torch.distributed.fsdp",
    ]
)

Line = dict[str, Any]


def until(condition: Callable[[], object], what: Callable[[], str] | str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        text = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {text}"
        time.sleep(0.01)


class Job:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.journals = path / "journal"
        self.journals.mkdir(parents=True)
        self.port = 0
        self.replicas: dict[str, BaseProcess] = {}
        self._everything: list[BaseProcess] = []
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._arguments: list[str] = []
        self.inside: list[str] = []  # a command that enters a network namespace
        for name, token in (("token", TOKEN), ("operator", OPERATOR_TOKEN)):
            (path / name).write_text(token)
            (path / name).chmod(0o600)

    # --- processes

    def coordinator(
        self, *, replicas: int, min_replicas: int = 1, options: tuple[str, ...] = (), breakpoints: str = ""
    ) -> None:
        self._arguments = [
            *("--job", "t", "--replicas", str(replicas), "--min-replicas", str(min_replicas)),
            *("--profile", "lab", "--evict-after", "20s", "--suspect-after", "10s", "--recovery-wait", "20s"),
            *("--store", str(self.path / "store"), "--token-file", str(self.path / "token")),
            *("--operator-token-file", str(self.path / "operator")),
            *options,
        ]
        self.restart_coordinator(breakpoints)

    def restart_coordinator(self, breakpoints: str = "") -> None:
        port_file = self.path / "port"
        port_file.unlink(missing_ok=True)
        with (self.path / "coordinator.log").open("ab") as log:
            self._coordinator = subprocess.Popen(
                [
                    *self.inside,
                    *(sys.executable, "-m", "ftar_core.coordinator", *self._arguments),
                    *("--listen", f"127.0.0.1:{self.port}", "--port-file", str(port_file)),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, **({"FTAR_BREAKPOINTS": breakpoints} if breakpoints else {})},
            )
        until(lambda: port_file.exists() and port_file.read_text().strip(), self.logs)
        self.port = int(port_file.read_text())

    def kill_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait()

    def coordinator_ended(self) -> int | None:
        assert self._coordinator is not None
        return self._coordinator.poll()

    def coordinator_exit(self) -> int:
        assert self._coordinator is not None
        return self._coordinator.wait(DEADLINE_S)

    def environment(self, name: str) -> dict[str, str]:
        return {
            "FTAR_COORDINATOR": f"127.0.0.1:{self.port}",
            "FTAR_JOB": "t",
            "FTAR_REPLICA": name,
            "FTAR_TOKEN_FILE": str(self.path / "token"),
            "FTAR_RAILS": "a=127.0.0.1,b=127.0.0.2",
            "FTAR_NODE": f"node-{name}",
            "FTAR_JOURNAL": str(self.journals),
        }

    def start(self, *names: str, environment: dict[str, str] | None = None, **options: Any) -> None:
        """`options` are fields of Recipe."""
        for name in names:
            settings = {**self.environment(name), **(environment or {})}
            recipe = Recipe(replica=name, environment=settings, log=self.path / f"{name}.log", **options)
            process = FORKS.Process(target=run, args=(recipe,), name=name)
            process.start()
            self.adopt(name, process)

    def start_team(
        self, *names: str, ranks: int = 2, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        """Replicas of several ranks: processes NAME/0, NAME/1. `options` are fields of ShardedRecipe."""
        for name in names:
            port = claim_port()
            for rank in range(ranks):
                settings = {
                    **self.environment(name),
                    **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                    **(environment or {}),
                }
                log = self.path / f"{name}.{rank}.log"
                recipe = sharded.ShardedRecipe(replica=name, environment=settings, log=log, **options)
                process = FORKS.Process(target=sharded.run, args=(recipe,), name=f"{name}/{rank}")
                process.start()
                self.adopt(f"{name}/{rank}", process)

    def adopt(self, name: str, process: BaseProcess) -> None:
        self.replicas[name] = process
        self._everything.append(process)

    def kill(self, name: str) -> None:
        pid = self.replicas[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.replicas[name].join(DEADLINE_S)

    def exit_code(self, name: str) -> int | None:
        self.replicas[name].join(DEADLINE_S)
        return self.replicas[name].exitcode

    def assert_finished(self, *names: str) -> None:
        """However long it takes, as long as something is still committed."""
        for name in names:
            before = -1
            while self.exit_code(name) is None and (now := max(self.steps(name), default=-1)) > before:
                before = now
            assert self.replicas[name].exitcode == 0, self.logs()

    def close(self) -> None:
        for process in self._everything:
            if process.is_alive():
                process.kill()
            process.join(5)
        if self._coordinator is not None and self._coordinator.poll() is None:
            self._coordinator.kill()
            self._coordinator.wait()

    # --- what happened

    def logs(self) -> str:
        texts = [f"--- {p.name}\n{p.read_text(errors='replace')[-4000:]}" for p in sorted(self.path.glob("*.log"))]
        return "\n".join(texts)

    def lines(self, name: str, kind: str) -> list[Line]:
        """`name`: a replica (the journal of its rank 0), or REPLICA/RANK."""
        replica, _, rank = name.partition("/")
        path = self.journals / f"{replica}.jsonl"
        if rank and rank != "0":
            path = self.journals / "ranks" / f"{replica}.{rank}.jsonl"
        if not path.exists():
            return []
        found: list[Line] = []
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue  # torn by a kill
            if line["kind"] == kind:
                found.append(line)
        return found

    def steps(self, name: str) -> list[int]:
        return [line["step"] for line in self.lines(name, "step")]

    def wait_step(self, name: str, step: int) -> None:
        until(lambda: any(s >= step for s in self.steps(name)), lambda: f"{name} at step {step}\n{self.logs()}")

    def wait_contributes(self, name: str, incarnation: int) -> None:
        """A life of this replica (1, 2, ...) has committed a step of its own."""

        def contributed() -> bool:
            starts = [line["incarnation"] for line in self.lines(name, "start")]
            life = starts[incarnation - 1] if len(starts) >= incarnation else None
            return any(not s["replayed"] and s["incarnation"] == life for s in self.lines(name, "step"))

        until(contributed, lambda: f"{name} contributes in its life {incarnation}\n{self.logs()}")

    def assert_identical(self, *names: str) -> Line:
        """All ended at the same step with bit-identical parameters and optimizer state."""
        ends = [self.lines(name, "end")[-1] for name in names]
        assert len({(e["step"], e["params_digest"], e["optimizer_digest"]) for e in ends}) == 1, (ends, self.logs())
        return ends[0]

    def finish(self, *names: str) -> int:
        """These make some more steps, then the job ends with the running one, on all of them alike. Returns that step.
        For what must have happened before the end: how many steps fit into that is the machine's affair."""
        self.wait_step(names[0], max(self.steps(names[0])) + 4)
        with self.operator() as operator:
            assert operator.request("finish", reason="test").code == "ok"
        self.assert_finished(*names)
        return int(self.assert_identical(*names)["step"])

    def operator(self) -> OperatorClient:
        return OperatorClient("127.0.0.1", self.port, "t", OPERATOR_TOKEN.encode(), "tester")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    try:
        yield made
    finally:
        made.close()
