"""A job in which processes fail at named points, a supervisor that starts them again, and the verdict."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import judge

from ftar_core.errors import FtarError

from .conftest import Job
from .network import Network, entered

DEADLINE_S = 90.0
STARTS_AGAIN = {75, 1}  # exit codes after which a supervisor starts a replica again, and a signal's
DRAINED = 76
WITHOUT = 20  # steps that the others make before a cut is mended
AFTERWARDS = 5  # steps that all must make together once the failure is over


@dataclass(frozen=True)
class Failure:
    """`ranks`: breakpoints of the first life of a replica, `later` of its second. `coordinator`: of the first one.
    `killed`: replicas that are killed at step 5 in any case, so that there is something to join and to catch up."""

    name: str
    ranks: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)
    coordinator: str = ""
    killed: tuple[str, ...] = ()
    replicas: int = 3
    min_replicas: int = 1
    spares: int = 0  # of the replicas: the last ones, started when the others train
    team: bool = False  # replicas of two ranks
    stops: str = ""  # the job ends, and its coordinator says this
    request: tuple[str, str] = ("", "")  # of an operator at step 5: drain, evict, rejoin; a replica
    cut: tuple[int, int] | None = None  # replicas that do not reach each other from step 5 on, for WITHOUT steps
    deaths: int = 0  # of replicas, if that cannot be counted from the above
    options: tuple[str, ...] = ()  # of the coordinator
    recipe: dict[str, Any] = field(default_factory=dict)
    quick: bool = False  # in the default run


class Supervised:
    """Starts what ended again, as an agent would, without the breakpoints of its earlier life."""

    def __init__(self, job: Job, failure: Failure) -> None:
        self.job, self.failure = job, failure
        self.names = [f"r{i}" for i in range(failure.replicas)]
        self.ranks = 2 if failure.team else 1
        self.lives = dict.fromkeys(self.names, 0)
        self.deaths: list[str] = []  # "r1/0: -9"
        self.coordinator_deaths = 0
        self.stopped: int | None = None  # exit code of the coordinator of a job that is over
        self.last_codes = (0, DRAINED) if failure.spares else (0,)  # a spare is sent away when the job ends
        self.blow = 0.0  # CLOCK_MONOTONIC seconds of the last thing that happened
        self._killed = False
        self._asked = not failure.request[0]
        self.network = Network() if failure.cut else None
        self._cut_at = 0  # the step
        self._mended = self.network is None
        self._frozen = {name for name, text in failure.ranks.items() if "action=stop" in text}

    def close(self) -> None:
        self.job.close()
        if self.network is not None:
            self.network.close()

    def begin(self) -> None:
        failure = self.failure
        if self.network is not None:
            self.job.inside = self.network.inside
        detection = ("--suspect-after", "4s", "--evict-after", "8s")  # a busy machine is no dead replica
        self.job.coordinator(
            replicas=failure.replicas - failure.spares,
            min_replicas=failure.min_replicas,
            options=(*detection, "--prepare", "5s", "--spares", str(failure.spares), *failure.options),
            breakpoints=failure.coordinator,
        )
        for name in self.names[: failure.replicas - failure.spares]:
            self.start(name)

    def start(self, name: str) -> None:
        self.lives[name] += 1
        self.blow = time.monotonic()
        breakpoints = {1: self.failure.ranks, 2: self.failure.later}.get(self.lives[name], {}).get(name, "")
        environment = {"FTAR_BREAKPOINTS": breakpoints} if breakpoints else {}
        namespace, links = "", {}
        if self.network is not None:
            environment["FTAR_RAILS"] = self.network.rails(self.names.index(name))
            namespace = self.network.path
            links = {"unreachable_ms": 2000}
        turns = self.job.path / f"{name}.turns"
        if self.failure.team:
            options = {"step_ms": 40.0, **self.failure.recipe}
            self.job.start_team(name, environment=environment, steps=0, turns=turns, **options)
        else:
            options = {"step_ms": 30.0, "chunk_bytes": 1024, "width": 400, **links, **self.failure.recipe}
            options["namespace"] = namespace
            self.job.start(name, environment=environment, steps=0, turns=turns, **options)

    def processes(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self.ranks)] if self.failure.team else [name]

    def tend(self) -> None:
        """Once: start again what ended, kill and drain what is to be."""
        code = self.job.coordinator_ended()
        if code is not None and self.stopped is None:
            if code in (0, 1):
                self.stopped = code
            else:
                self.coordinator_deaths += 1
                self.job.restart_coordinator()
                self.blow = time.monotonic()
        if not self._killed and self.failure.killed and self._step() >= 5:
            self._killed = True
            for name in self.failure.killed:
                self.job.kill(self.processes(name)[0])
        for name in self.names:
            if not self.lives[name] and self._step() >= 3:
                self.start(name)
        if not self._asked and self._step() >= 5:
            self._ask(*self.failure.request)
        for name in [name for name in self.names if self.lives[name]]:
            codes = [self.job.replicas[process].exitcode for process in self.processes(name)]
            if all(code is not None for code in codes) and any(code for code in codes):
                if self.stopped is not None and all(code in self.last_codes for code in codes):
                    continue
                if all(code == DRAINED for code in codes):
                    self._ask("rejoin", name)
                    if not self._asked:
                        continue
                else:
                    self.deaths.append(f"{name}: {codes}")
                    assert any(code in STARTS_AGAIN or (code or 0) < 0 for code in codes), (codes, self.job.logs())
                if self.stopped is None:
                    self.start(name)
        if not self._mended:
            self._cut_or_mend()
        for name in list(self._frozen):
            self._thaw(name)

    def _ask(self, op: str, name: str) -> None:
        """What an operator does who is sent away by a coordinator that dies: ask again."""
        try:
            self._asked = self.request(op, name) in ("ok", "conflict")
            self.blow = time.monotonic()
        except (OSError, FtarError):
            self._asked = False

    def request(self, op: str, name: str = "") -> str:
        with entered(self.network.path) if self.network is not None else nullcontext():
            with self.job.operator() as operator:
                return operator.request(op, replica=name, reason="test").code

    def _cut_or_mend(self) -> None:
        assert self.network is not None
        assert self.failure.cut is not None
        if not self._cut_at and self._step() >= 5:
            self.network.cut(*self.failure.cut)
            self._cut_at = self._step()
        elif self._cut_at:
            alone = [
                s for n in self.names for s in self.job.lines(n, "step") if len(s["contributors"]) < len(self.names)
            ]
            if max((s["step"] for s in alone), default=0) >= self._cut_at + WITHOUT:
                self.network.mend()
                self._mended = True
                self.blow = time.monotonic()

    def _thaw(self, name: str) -> None:
        """A frozen replica wakes up when the others have gone on without it."""
        others = [step for other in self.names if other != name for step in self.job.lines(other, "step")]
        if any(name not in step["contributors"] for step in others):
            for process in self.processes(name):
                pid = self.job.replicas[process].pid
                assert pid is not None
                os.kill(pid, signal.SIGCONT)
            self._frozen.discard(name)
            self.blow = time.monotonic()

    def _step(self) -> int:
        return max((max(self.job.steps(name), default=0) for name in self.names), default=0)

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            self.tend()
            state = f"{what}: deaths {self.deaths}, coordinators {self.coordinator_deaths}\n{self.job.logs()}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {state}"
            time.sleep(0.02)

    def settled(self) -> bool:
        return self._asked and not self._frozen and self._mended

    def all_contribute(self) -> bool:
        """Every replica has committed AFTERWARDS steps in its present life since the last blow, all together; of the
        spares it is enough that they follow."""
        contributors = len(self.names) - self.failure.spares
        spares = 0
        if not all(self.lives.values()):
            return False
        for name in self.names:
            starts = judge.of_kind(judge.read_lines(self.job.journals / f"{name}.jsonl"), "start")
            if not starts or starts[-1]["pid"] != self.job.replicas[self.processes(name)[0]].pid:
                return False
            life = starts[-1]["incarnation"]
            lines = self.job.lines(name, "step")
            lines = [s for s in lines if s["incarnation"] == life and s["mono"] > self.blow]
            together = [s for s in lines if len(s["contributors"]) == contributors]
            if len(together) < AFTERWARDS:
                return False
            spares += together[-1]["replayed"]
        return spares == self.failure.spares

    def finish(self) -> None:
        assert self.request("finish") == "ok"
        self.until(lambda: self.stopped is not None, "the coordinator ends")
        for name in self.names:
            for process in self.processes(name):
                assert self.job.exit_code(process) in self.last_codes, (process, self.job.logs())

    def verdict(self) -> list[str]:
        journals = judge.journals_of(self.job.journals)
        turns = self.job.path.glob("*.turns")
        problems = judge.truths(journals) + judge.applied(journals)
        if not self.failure.team:
            problems += judge.recomputed(turns)
        if not self.failure.stops:
            last = max(line["step"] for line in judge.of_kind(journals["r0/0"], "step"))
            problems += judge.data(journals, last)
            problems += judge.same_bits(journals, sorted(journals), self.last_codes)
        return problems


def run_failure(job: Job, failure: Failure) -> Supervised:
    supervised = Supervised(job, failure)
    try:
        _run(supervised)
    finally:
        supervised.close()
    return supervised


def _run(supervised: Supervised) -> None:
    job, failure = supervised.job, supervised.failure
    supervised.begin()
    if failure.stops:
        supervised.until(lambda: supervised.stopped is not None, "the job stops")
        assert supervised.stopped == 1
        log = (job.path / "coordinator.log").read_text()
        assert failure.stops in log, log
    else:
        texts = (*failure.ranks.values(), *failure.later.values())
        wanted = sum("action" not in text or "raise" in text for text in texts)
        deaths = failure.deaths or max(wanted, len(failure.killed))

        def over() -> bool:
            failed = len(supervised.deaths) >= deaths and supervised.settled()
            failed = failed and (not failure.coordinator or supervised.coordinator_deaths > 0)
            return failed and supervised.all_contribute()

        supervised.until(over, "the failure is over and all contribute")
        supervised.finish()
    problems = supervised.verdict()
    assert not problems, (problems, supervised.deaths, job.logs())
