"""When too few replicas contribute while faults are in force, they are taken back and no more are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_links import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from agents.api.breaker import Breaker, Share
from agents.api.models import JobState, ReplicaState
from agents.audit import AuditLog
from agents.breaker import BreakerWatch
from agents.halt import Halt
from agents.host.machine import Machine
from agents.injection.guard import Limits
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Ledger
from agents.injection.problems import FaultProblem
from agents.injection.reverting import Reverter
from agents.problems import ApiProblem
from agents.settings import BreakerSettings


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.one_of(st.none(), st.integers(0, 4)), st.booleans()), max_size=40),
    st.sampled_from([0.0, 25.0, 50.0, 51.0, 100.0]),
)
def test_it_opens_exactly_when_it_was_low_all_the_time(
    looks: list[tuple[float, int | None, bool]], bound: float
) -> None:
    """Against a twin that keeps the whole history."""
    breaker, now = Breaker(), 0.0
    history: list[tuple[float, bool]] = []
    for passed, good, calm in looks:
        now += passed
        if calm:
            breaker.calm()
            history.clear()
            continue
        share = Share("replicas contribute", good or 0, 0 if good is None else 4, bound)
        history.append((now, good is not None and good / 4 < bound / 100))
        run = history[max((i for i, (_, low) in enumerate(history) if not low), default=-1) + 1 :]
        why = breaker.look(now, (share,), 5.0)
        assert bool(why) == (bool(run) and now - run[0][0] >= 5.0)
        if why:
            assert f"{good} of 4 replicas contribute" in why
            assert f"below {bound:g} %" in why


def job(contributing: int, wanted: int = 4, state: str = "running") -> JobState:
    replicas = [
        ReplicaState(
            name=f"r{i}",
            state="contributing" if i < contributing else "unreachable",
            reason="",
            since=0.0,
            incarnation=1,
            slot=i,
            step=1,
            nodes=[],
            heartbeat_age_ms=1.0,
            phase="",
            loss=None,
            step_ms=None,
        )
        for i in range(wanted)
    ]
    return JobState(
        name="j",
        state=state,
        reason="",
        step=1,
        term=1,
        epoch=1,
        contributors=[r.name for r in replicas[:contributing]],
        replicas_wanted=wanted,
        min_replicas=1,
        replicas=replicas,
        stalls=[],
        settings={},
    )


@dataclass
class Node:
    injector: Injector
    halt: Halt
    audit: AuditLog
    clock: FakeClock
    job: JobState | None = field(default_factory=lambda: job(4))
    asked: int = 0

    def watch(self, **settings: Any) -> BreakerWatch:
        def ask() -> JobState:
            self.asked += 1
            if self.job is None:
                raise ApiProblem("coordinator", "coordinator", "nobody listens there")
            return self.job

        limits = BreakerSettings(**settings)
        return BreakerWatch(
            "node1", limits, self.injector, self.halt, ask, self.audit, self.clock, lambda: self.clock.boot
        )

    def down(self) -> str:
        return self.injector.inject(Injection("link-down", "ann", 300.0, nic="rail0")).id

    def later(self, watch: BreakerWatch, seconds: int) -> bool:
        """A look every second; whether one of them halted faults."""
        found = False
        for _ in range(seconds):
            self.clock.boot += 1
            self.clock.wall += 1
            found = watch.tick() or found
        return found


@pytest.fixture
def node(machine: Machine, clock: FakeClock, ledger_directory: Path, tmp_path: Path) -> Node:
    ledger = Ledger(ledger_directory)
    limits = Limits("node1", ("rail0", "rail1"), "mgmt0", max_faults=3, max_duration_s=900)
    reverter = Reverter(ledger, machine, sleep=lambda _s: None)
    injector = Injector(ledger, machine, limits, lambda *e: None, reverter=reverter)
    injector.start()
    halt = Halt(tmp_path / "halt.json", "node1", lambda *e: None)
    injector.halted = halt.why
    return Node(injector, halt, AuditLog(tmp_path / "audit.jsonl"), clock)


def test_faults_are_halted_and_stay_so_until_somebody_allows_them(node: Node, links: Any, tmp_path: Path) -> None:
    watch = node.watch()
    assert not node.later(watch, 20)
    assert node.asked == 0, "an agent at rest asks nobody"
    fault = node.down()
    node.job = job(1)
    assert not node.later(watch, 5)
    assert node.later(watch, 2)
    entry = node.injector.find(fault)
    assert entry is not None
    assert not entry.open
    assert "halted by the breaker" in entry.detail
    assert links.devices[2].up
    with pytest.raises(FaultProblem) as caught:
        node.down()
    assert "1 of 4 replicas contribute (25 %) for 5 s: below 50 % (breaker of node1)" in caught.value.reason
    (record,) = node.audit.read(0.0, 10).records
    assert (record.who, record.action, record.result) == ("breaker", "halt", "ok")
    assert fault in record.detail
    assert Halt(tmp_path / "halt.json", "node1", lambda *e: None).view() is not None, "a restart forgets nothing"

    assert node.halt.clear("ann", "the switch is back")
    assert not node.later(watch, 30), "what was reverted before is not counted again"
    node.down()
    assert node.later(watch, 8), "it is low still, and a fault is in force again"


def test_what_it_cannot_know_neither_opens_nor_closes_it(node: Node) -> None:
    watch = node.watch()
    node.down()
    node.job = None
    assert not node.later(watch, 30)
    node.job = job(0, state="finished")
    assert not node.later(watch, 30)
    node.job = job(2)
    assert not node.later(watch, 30), "half of them is the bound"
    node.job = job(1)
    assert not node.later(watch, 4)
    node.job = None
    assert not node.later(watch, 30)
    node.job = job(1)
    assert node.later(watch, 1), "nothing said that it is better"


def test_a_fault_that_is_over_is_answered_for_only_a_while(node: Node) -> None:
    watch = node.watch(replicas_percent=50.0, after_s=5.0)
    node.injector.revert(node.down(), "by ann")
    assert not node.later(watch, 70)
    node.job = job(0)
    assert not node.later(watch, 30), "a real failure, and no fault of ours near it"


@pytest.mark.parametrize("step_s", [-7200.0, 0.0, 7200.0])
def test_a_date_that_is_set_neither_opens_nor_closes_it(node: Node, step_s: float) -> None:
    """An hour after one fault and just after another, also to an agent that was started since."""
    old = node.down()
    node.injector.revert(old, "by ann")
    node.clock.boot += 3600
    node.clock.wall += 3600 + step_s
    node.job = job(1)
    assert not node.later(node.watch(), 30), "what is low has nothing to do with a fault of an hour ago"
    assert node.asked == 0
    new = node.down()
    node.injector.revert(new, "by ann")
    node.clock.wall += step_s
    assert node.later(node.watch(), 8), "what follows from a fault that is just over may be its doing"


def test_faults_of_before_a_reboot_are_nobodys_doing(node: Node) -> None:
    node.injector.revert(node.down(), "by ann")
    node.clock.boot, node.clock.id = 5.0, "another"
    node.job = job(1)
    assert not node.later(node.watch(), 30)
