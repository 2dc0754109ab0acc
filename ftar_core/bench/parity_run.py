"""One run of `bench parity`: a job with the storm of its plan, from its first step to the last token.

Who was killed is started again when so many steps are committed without it. Replicas do not begin a later step before
the new process has come to its loop, and give steps a least length until it contributes: how long an outage is does not
depend on how fast this machine starts processes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftar_core.bench import parity_plan as plan
from ftar_core.bench.board import NO_LIMIT, Board
from ftar_core.bench.jobs import PATIENT, Job, Parent, last_words
from ftar_core.bench.report import BenchError
from ftar_core.wire.exits import RankExit

MODULE = "ftar_core.bench.parity_replica"
SCHEMA = 1
RETURN_PAUSE_MS = 40  # of a step while somebody catches up
LOOK_S, VIEW_S = 0.004, 0.05
STALL_S, END_S = 180.0, 15.0
KILLED = -9
DRAIN_EVERY = 40

Tell = Callable[[float], None]


@dataclass(frozen=True)
class Task:
    """What all runs that are compared have in common."""

    replicas: int
    tokens: int
    batch_size: int
    learning_rate: float
    layers: int
    heads: int
    width: int
    context: int

    @property
    def samples(self) -> int:
        return self.tokens // self.context

    @property
    def steps(self) -> int:
        """With all replicas."""
        return -(-self.samples // (self.batch_size * self.replicas))


@dataclass(frozen=True)
class Case:
    """One run. `setting`: calm, drains, or a storm."""

    setting: str
    batch: str
    seed: int

    @property
    def directory(self) -> str:
        return f"{self.setting.replace('/', '-')}.{self.batch}.{self.seed}"

    @property
    def storm(self) -> plan.Storm | None:
        return None if self.setting in (plan.CALM, plan.DRAINS) else plan.parse_storm(self.setting)


@dataclass
class Told:
    """What happened to the processes, for run.json."""

    failures: list[dict[str, int | str]] = field(default_factory=list)
    restarts: int = 0  # of lives that asked for it


class Run:
    def __init__(self, task: Task, case: Case, job: Job, board: Board, result: Path) -> None:
        self.task, self.case, self.job, self.board = task, case, job, board
        self.told = Told()
        self._result = result
        self._names = names_of(task, case)
        self._away: dict[str, int] = {}  # replica -> the step before which it is started again
        self._arriving: set[str] = set()  # started again, not in its loop yet
        self._returning: dict[str, int] = {}  # -> the last step it worked on; it does not contribute yet
        self._draining: set[str] = set()
        self._over_s = 0.0  # since when the job is over
        self._options: dict[str, Any] = {
            "replicas": list(self._names),
            "wanted": task.replicas,
            "seed": case.seed,
            "batch": case.batch,
            "samples": task.samples,
            "batch_size": task.batch_size,
            "learning_rate": task.learning_rate,
            "shape": {name: getattr(task, name) for name in ("layers", "heads", "width", "context")},
            "storm": asdict(case.storm) if case.storm is not None else None,
            "board": str(job.directory / "board"),
            "result": str(result),
        }
        self._drains: Iterator[tuple[int, int]] = iter(())
        if case.setting == plan.DRAINS:
            self._drains = plan.drain_steps(self._names[: task.replicas], case.seed, DRAIN_EVERY)
        self._drain = next(self._drains, None)
        self._view_s = 0.0

    def go(self, tell: Tell) -> None:
        """BenchError: it did not come to its end."""
        for name in self._names[: self.task.replicas]:
            self._start(name)
        spares = list(self._names[self.task.replicas :])
        seen, since = 0, time.monotonic()
        while not self._over():
            now, step = time.monotonic(), self.board.furthest()
            if step > seen:
                seen, since = step, now
                tell(min(1.0, step / self.task.steps))
                while spares:
                    self._start(spares.pop())
            elif now - since > STALL_S:
                raise BenchError(f"{self.case.directory}: no step for {STALL_S:.0f} s, at step {step}")
            for name in self.job.look():
                self._ended(name, self.job.codes[name])
            self._bring_back(step)
            if self._drain is not None and step >= self._drain[0] and now >= self._view_s and not self._over_s:
                self._view_s = now + VIEW_S
                self._consider_drain()
            time.sleep(LOOK_S)

    def _start(self, name: str) -> None:
        self.job.start(name, self._options, FTAR_BREAKPOINTS="allow")

    def _over(self) -> bool:
        """Those who contributed to the last step have ended; whoever was catching up is not waited for long."""
        if not self._over_s:
            return False
        waited = time.monotonic() - self._over_s
        if self._result.exists():
            return not self.job.pids or waited > END_S
        if not self.job.pids or waited > STALL_S:
            raise BenchError(f"{self.case.directory}: nobody measured the held-out loss")
        return False

    def _ended(self, name: str, code: int) -> None:
        self._arriving.discard(name)
        if code == RankExit.FINISHED or self._over_s:
            self._over_s = self._over_s or time.monotonic()
            self.board.limit = NO_LIMIT
        elif code == KILLED and self.case.storm is not None:
            step = self.board.step(name)
            self.told.failures.append({"replica": name, "step": step, "kind": "kill"})
            self._away[name] = step + self.case.storm.out
            self._set_limit()
        elif code == RankExit.DRAINED and name not in self._draining:
            pass  # the job has ended without it: it was catching up
        elif code == RankExit.DRAINED:
            self._draining.discard(name)
            self.told.failures.append({"replica": name, "step": self.board.step(name), "kind": "drain"})
            if self._ask("rejoin", name):
                self._start(name)
        elif code == RankExit.RESTART:
            self.told.restarts += 1
            self._start(name)
        else:
            raise BenchError(
                f"{self.case.directory}: {name} has ended with {code}: {last_words(self.job.log_of(name))}"
            )

    def _bring_back(self, step: int) -> None:
        for name in [name for name, due in self._away.items() if step >= due and not self._over_s]:
            del self._away[name]
            self._returning[name] = self.board.step(name)
            self._arriving.add(name)
            self._start(name)
        come = {name for name in self._arriving if self.board.has_arrived(name, self.job.pids.get(name, 0))}
        if come:
            self._arriving -= come
            self._set_limit()
        for name in [name for name, last in self._returning.items() if self.board.step(name) > last]:
            del self._returning[name]
        waiting = self.case.setting == plan.DRAINS and self._drain is not None and step >= self._drain[0]
        self.board.pause_ms = RETURN_PAUSE_MS if self._returning or waiting else 0

    def _set_limit(self) -> None:
        if not self._arriving:
            self.board.limit = min(self._away.values(), default=NO_LIMIT + 1) - 1

    def _consider_drain(self) -> None:
        """Only when a spare is there to take the place: with fewer contributors there is nothing to compare."""
        try:
            view = self.job.view()
        except OSError:
            return
        if self._drain is None or not any(replica.state == "spare" for replica in view.replicas):
            return
        victim = sorted(view.contributors)[self._drain[1] % len(view.contributors)]
        if self._ask("drain", victim):
            self._draining.add(victim)
            self._drain = next(self._drains, None)

    def _ask(self, op: str, replica: str) -> bool:
        """False: refused, or the coordinator has ended with its job."""
        try:
            return self.job.operator().request(op, replica=replica, reason="bench parity").code == "ok"
        except OSError:
            return False


def names_of(task: Task, case: Case) -> tuple[str, ...]:
    """Replicas; of a run with drains also the hot spare."""
    return tuple(f"r{i}" for i in range(task.replicas + (case.setting == plan.DRAINS)))


def run_case(task: Task, case: Case, parent: Parent, directory: Path, tell: Tell) -> None:
    """Leaves `directory`/NAME behind, whole or not at all: run.json, the journals, the coordinator's events, logs."""
    part = directory / f".{case.directory}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    settings = [*PATIENT, "--spares", "1"] if case.setting == plan.DRAINS else PATIENT
    result = part / "held-out.json"
    board = Board(part / "board", names_of(task, case), new=True)
    began = time.monotonic()
    try:
        with Job(part, parent, replicas=task.replicas, settings=settings) as job:
            run = Run(task, case, job, board, result)
            run.go(tell)
    finally:
        board.close()
        for file in (part / "board", part / "port", part / "measured-by"):
            file.unlink(missing_ok=True)
    document = {
        "schema": SCHEMA,
        "bench": "parity",
        "task": asdict(task),
        "case": asdict(case),
        "held_out_loss": json.loads(result.read_text())["loss"],
        "failures": run.told.failures,
        "restarts": run.told.restarts,
        "seconds": round(time.monotonic() - began, 3),
        "load": round(os.getloadavg()[0], 2),
    }
    (part / "run.json").write_text(json.dumps(document) + "\n")
    result.unlink()
    part.rename(directory / case.directory)
