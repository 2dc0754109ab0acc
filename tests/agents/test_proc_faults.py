"""Faults on the processes of a replica, with real processes; the guards that keep enough replicas."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_links import FakeClock

from agents.api.faultspecs import POINTS
from agents.api.words import FaultState
from agents.faults.rhythm import Rhythm, phase
from agents.host.machine import Machine
from agents.host.processes import start_time_of, state_of
from agents.host.workers import Worker
from agents.injection.deadlines import Deadlines
from agents.injection.guard import JobFacts, Limits
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Entry, Ledger
from agents.injection.problems import FaultProblem
from agents.injection.reverting import Reverter
from ftar_core.wire.breakpoints import RANK_POINTS

LIMITS = Limits("node1", ("rail0", "rail1"), "mgmt0", max_faults=5, max_duration_s=900)
JOB = JobFacts(True, ("r0", "r1", "r2"), 2)


class Workers:
    def __init__(self) -> None:
        self.list: list[Worker] = []

    def all(self) -> tuple[Worker, ...]:
        return tuple(self.list)

    def tell(self, worker: Worker, message: msgspec.Struct) -> None:
        raise AssertionError("nobody is told anything here")

    def listens(self, worker: Worker) -> bool:
        return False

    def armed(self, worker: Worker) -> None:
        return None


@dataclasses.dataclass
class Node:
    injector: Injector
    deadlines: Deadlines
    workers: Workers
    clock: FakeClock
    job: JobFacts = JOB

    def inject(self, kind: str, **wish: Any) -> Entry:
        return self.injector.inject(Injection(**{"kind": kind, "owner": "ann", "duration_s": 30.0, **wish}))

    def refused(self, kind: str, **wish: Any) -> FaultProblem:
        with pytest.raises(FaultProblem) as caught:
            self.inject(kind, **wish)
        return caught.value

    def states(self) -> str:
        """A letter for each: T stands still, - has ended, S neither."""
        letters = [state_of(w.pid, w.start_time) for w in self.workers.list]
        return "".join("T" if letter == "T" else "S" if letter else "-" for letter in letters)

    def later(self, seconds: float) -> None:
        self.clock.boot += seconds
        self.deadlines.tick()


@pytest.fixture
def node(machine: Machine, clock: FakeClock, ledger_directory: Path) -> Iterator[Node]:
    """Two ranks of r1 and one of r2 on this node."""
    workers = Workers()
    machine = dataclasses.replace(machine, workers=workers)
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    for (replica, rank), child in zip((("r1", 0), ("r1", 1), ("r2", 0)), children, strict=True):
        workers.list.append(Worker(replica, rank, child.pid, start_time_of(child.pid) or 0))
    ledger = Ledger(ledger_directory)
    events: list[tuple[str, str, str]] = []
    reverter = Reverter(ledger, machine, sleep=lambda _s: None)
    injector = Injector(ledger, machine, LIMITS, lambda *e: events.append(e), reverter=reverter, job=lambda: made.job)
    injector.start()
    made = Node(injector, Deadlines(injector, lambda *e: None, "node1"), workers, clock)
    try:
        yield made
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_kill_is_done_at_once_and_stays_done(node: Node) -> None:
    entry = node.inject("proc-kill", replica="r1", rank=1)
    assert (entry.state, entry.irreversible) == (FaultState.DONE, True)
    assert node.states() == "S-S"
    assert node.injector.book.open() == []
    assert node.injector.revert(entry.id, "by ann").state is FaultState.DONE
    assert "ended" in node.refused("proc-kill", replica="r1", rank=1).reason


def test_a_whole_replica_hangs_until_its_time_is_up(node: Node) -> None:
    entry = node.inject("proc-hang", replica="r1", duration_s=10)
    assert node.states() == "TTS"
    assert str(entry.target) == "node1/r1"
    node.later(10.1)
    assert node.states() == "SSS"
    assert node.injector.book.open() == []


def test_a_process_that_ended_meanwhile_is_left_alone_and_so_is_its_number(node: Node) -> None:
    entry = node.inject("proc-hang", replica="r1", rank=0)
    pid = node.workers.list[0].pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    reverted = node.injector.revert(entry.id, "by ann")
    assert reverted.state is FaultState.REVERTED
    assert "has ended meanwhile" in reverted.detail
    stranger = node.workers.list[1]
    os.kill(stranger.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stranger.pid, os.WSTOPPED | os.WNOWAIT)
    old = msgspec.structs.replace(stranger, start_time=stranger.start_time - 1)  # the number was somebody else's
    node.workers.list[1] = old
    assert node.refused("proc-hang", replica="r1", rank=1).code == "failed"
    assert state_of(stranger.pid, stranger.start_time) == "T"


def test_what_others_have_stopped_is_not_stopped_by_us(node: Node) -> None:
    worker = node.workers.list[2]
    os.kill(worker.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
    problem = node.refused("proc-hang", replica="r2")
    assert (problem.code, problem.hint.startswith(f"kill -CONT {worker.pid}")) == ("refused", True)


def test_a_slow_process_stands_still_for_its_part_of_the_time(node: Node) -> None:
    entry = node.inject("proc-slow", replica="r1", rank=0, params={"percent": 25.0, "period_ms": 1000.0})
    seen = node.states()[0]
    for _ in range(39):
        node.later(0.1)
        seen += node.states()[0]
    assert 9 <= seen.count("T") <= 12
    assert seen.count("TS") >= 4
    found = node.injector.find(entry.id)
    assert found is not None
    assert "in a pause" in found.detail
    assert node.injector.revert(entry.id, "by ann").state is FaultState.REVERTED
    node.later(1.0)
    assert node.states() == "SSS"


def test_one_fault_on_a_process_at_a_time(node: Node) -> None:
    first = node.inject("proc-slow", replica="r1", rank=0)
    for wish in ({"rank": 0}, {}):
        problem = node.refused("proc-hang", replica="r1", **wish)
        assert first.id in problem.reason
    assert node.inject("proc-hang", replica="r1", rank=1).state is FaultState.ACTIVE


def test_enough_replicas_are_left_or_the_guard_says_why_not(node: Node) -> None:
    node.job = JobFacts(True, ("r0", "r1"), 2)
    problem = node.refused("proc-kill", replica="r1")
    assert problem.reason == "without r1 only r0 would contribute, and the job needs at least 2"
    assert "--allow-last-replica" in problem.hint
    node.job = JobFacts(True, ("r1",), 0)
    assert "no replica would contribute" in node.refused("proc-hang", replica="r1").reason
    node.job = JobFacts(problem="coordinator of job main: no answer in time")
    assert "no answer in time" in node.refused("proc-hang", replica="r1").reason
    assert node.states() == "SSS"
    assert node.inject("proc-slow", replica="r2").state is FaultState.ACTIVE, "it takes nobody out"
    assert node.inject("proc-hang", replica="r1", allow_last_replica=True).state is FaultState.ACTIVE


@pytest.mark.parametrize(
    ("wish", "code", "words"),
    [
        ({"replica": "r9"}, "unknown-replica", "r9 has no process on node1"),
        ({"replica": "r1", "rank": 7}, "unknown-replica", "r1 rank 7"),
        ({}, "bad-request", "needs a replica"),
        ({"replica": "r1", "nic": "rail0"}, "bad-request", "takes no nic"),
        ({"replica": "r1", "params": {"signal": "HUP"}}, "bad-request", "must be one of KILL"),
    ],
)
def test_bad_targets_and_parameters(node: Node, wish: dict[str, Any], code: str, words: str) -> None:
    problem = node.refused("proc-kill", **wish)
    assert problem.code == code
    assert words in problem.reason
    assert node.states() == "SSS"


def test_a_rank_that_takes_no_breakpoints_is_refused_with_what_to_set(node: Node) -> None:
    problem = node.refused("replica-crash-at", replica="r1", params={"point": "reduced"})
    assert "takes no breakpoints" in problem.reason
    assert "FTAR_BREAKPOINTS=allow" in problem.hint
    assert set(POINTS) == set(RANK_POINTS) - {"bucket"}


def test_a_rhythm_adds_up_whatever_its_jitter_and_begins_at_once() -> None:
    for jitter in (0.0, 0.5, 1.0):
        rhythm = Rhythm(2.0, 0.3, jitter, seed=7)
        assert phase(rhythm, 0.0).on
        at, on_s = 0.0, 0.0
        while at < 200.0:
            now = phase(rhythm, at)
            assert now.left_s > 0
            on_s += now.left_s if now.on else 0.0
            at += now.left_s + 1e-9
        assert on_s == pytest.approx(60.0, abs=0.7)
    assert phase(Rhythm(2.0, 0.3, 1.0, 1), 10.4) != phase(Rhythm(2.0, 0.3, 1.0, 2), 10.4)
