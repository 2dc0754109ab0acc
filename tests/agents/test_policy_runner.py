"""The policy of an agent over the real health desk: what it hears, decides, does, tells, and remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fake_links import FakeClock
from live_agent import until

from agents.api.models import JobState, ReplicaState
from agents.api.policyfile import Policy, parse, read
from agents.api.words import Action, Health
from agents.because import Because
from agents.health.causes import News
from agents.health.desk import HealthDesk
from agents.health.signals import Ends, Observed, Signal
from agents.monitors.problems import advised, of_verdicts
from agents.policy.book import PolicyBook
from agents.policy.engine import Fleet
from agents.policy.hands import fleet_of
from agents.policy.runner import MAX_QUEUE, PolicyRunner
from agents.problems import ApiProblem

XID79 = Signal("gpu", "gpu 0", "xid.79", Health.UNHEALTHY, "fell off the bus", Action.EVICT_NODE, ends=Ends.CLEAR,
               injected=True, fault="f-1")  # fmt: skip
XID31 = Signal("gpu", "gpu 0", "xid.31", Health.DEGRADED, "MMU page fault", Action.RESTART)
XID63 = Signal("gpu", "gpu 0", "xid.63", Health.HEALTHY, "row remap recorded", Action.RESET_IDLE)


@dataclass
class Hands:
    """Four replicas, r0 is here."""

    away: set[str] = field(default_factory=set)
    out: int = 0
    done: list[tuple[str, str]] = field(default_factory=list)
    fails: str = ""
    gone: bool = False
    cordoned: bool = False

    def whom(self, kind: str, name: str, *, whole_node: bool) -> tuple[str, ...]:
        return () if self.gone else ("r0",)

    def fleet(self, action: str, whom: Sequence[str]) -> Fleet:
        away = tuple(name for name in whom if name in self.away)
        return Fleet(4, self.out + len(self.away), bool(whom), tuple(whom), away)

    def act(self, action: str, replica: str, reason: str, because: Because, max_share: float) -> str:
        if self.fails:
            raise ApiProblem("coordinator", "coordinator of job lab", self.fails)
        assert because.incident
        assert because.action == action
        assert max_share == 0.34
        self.done.append((action, replica))
        if action in ("evict", "drain"):
            self.away.add(replica)
        elif action == "rejoin":
            self.away.discard(replica)
        return "is under way"

    def cordon(self, reason: str, because: Because) -> bool:
        before, self.cordoned = self.cordoned, True
        return not before

    def uncordon(self, reason: str, because: Because) -> None:
        self.cordoned = False


@dataclass
class Event:
    kind: str
    reason: str
    incident: str
    action: str
    injected: bool


class Node:
    def __init__(self, path: Path, clock: FakeClock, policy: Policy, mode: str = "act") -> None:
        self.clock, self.hands = clock, Hands()
        self.events: list[Event] = []
        self.desk = HealthDesk("node0", self.emit, clock)
        book = PolicyBook(path, clock.boot_id())
        self.runner = PolicyRunner("node0", policy, "test", mode, book, self.hands, self.desk, self.emit, clock)
        self.desk.listen(self.runner.handle)

    def emit(self, kind: str, thing: str, reason: str, *, injected: bool = False, incident: str = "",
             action: str = "", **_more: object) -> None:  # fmt: skip
        self.events.append(Event(kind, reason, incident, action, injected))

    def well(self, name: str = "gpu 0") -> None:
        self.desk.retract("ft-agent", "repaired", lambda signal: signal.object == name)
        self.desk.see("gpus", [Observed("gpu", name, "answers")])

    def wait(self, seconds: float) -> None:
        self.clock.boot += seconds
        self.runner.tick()

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == f"policy.{kind}"]


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(tmp_path / "policy.json", clock, read())


def test_a_lost_gpu_is_one_chain_of_one_incident_from_the_verdict_to_the_return(node: Node) -> None:
    incident = node.desk.occur(XID79)
    node.wait(0.25)
    assert node.hands.done == [("evict", "r0")]
    assert node.hands.cordoned
    node.wait(60)
    assert node.hands.done == [("evict", "r0")], "nothing is repeated while it lasts"
    node.well()
    node.wait(1)
    assert node.hands.done == [("evict", "r0")], "it must be well for rejoin_after_s"
    node.wait(1.5)
    assert node.hands.done == [("evict", "r0"), ("rejoin", "r0")]
    assert not node.hands.cordoned
    chain = [event for event in node.events if event.incident == incident]
    assert [(event.kind, event.action) for event in chain] == [
        ("gpu.unhealthy", "evict_node"),
        ("policy.decided", "evict"),
        ("policy.acted", "evict"),
        ("policy.acted", "cordon"),
        ("gpu.healthy", "none"),
        ("policy.decided", "rejoin"),
        ("policy.acted", "uncordon"),
        ("policy.acted", "rejoin"),
    ]
    assert all(event.injected and event.reason for event in chain)
    assert node.runner.answer().held == []


def test_a_restart_is_no_eviction_and_what_is_recorded_is_only_told(node: Node) -> None:
    node.desk.occur(XID31)
    node.desk.occur(XID63)
    node.wait(1)
    assert node.hands.done == [("restart", "r0")]
    assert [event.action for event in node.told("decided")] == ["restart", "watch"]
    node.desk.occur(XID79)
    assert node.hands.done[-1] == ("evict", "r0"), "a stronger act does not wait for the cool-down"


@pytest.mark.parametrize("mode", ["observe", "recommend"])
def test_other_modes_tell_and_do_nothing(tmp_path: Path, clock: FakeClock, mode: str) -> None:
    node = Node(tmp_path / "policy.json", clock, read(), mode)
    node.desk.occur(XID79)
    node.wait(100)
    assert node.hands.done == []
    assert [event.kind for event in node.events] == ["gpu.unhealthy", "policy.decided"]
    assert f"mode is {mode}" in node.events[1].reason
    wanted = node.runner.recommendations()
    shown = advised(of_verdicts(node.desk.verdicts()), wanted)
    assert [one.reason for one in shown] == [one.reason for one in wanted or of_verdicts(node.desk.verdicts())]
    assert [bool("evict r0" in one.reason) for one in wanted] == ([True] if mode == "recommend" else [])
    node.well()
    assert node.runner.recommendations() == []


def test_a_mode_that_is_set_outlives_the_agent_and_what_stands_is_decided_anew(
    tmp_path: Path, clock: FakeClock
) -> None:
    node = Node(tmp_path / "policy.json", clock, read(), "observe")
    node.desk.occur(XID79)
    assert node.runner.set_mode("act", "ann", "trust it")
    assert not node.runner.set_mode("act", "ann", "again")
    node.runner.handle(*node.runner._heard.get_nowait())
    assert node.hands.done == [("evict", "r0")]
    later = Node(tmp_path / "policy.json", clock, read(), "observe")
    assert later.runner.mode == "act"
    assert [one.replica for one in later.runner.answer().held] == ["r0"]
    later.hands.away.add("r0")
    later.desk.see("gpus", [Observed("gpu", "gpu 0", "answers")])
    later.wait(0)
    later.wait(3)
    assert later.hands.done == [("rejoin", "r0")], "the next agent brings back whom the last one took out"


def test_a_damaged_record_means_no_act(tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "policy.json").write_text('{"mode": "act", "he')
    node = Node(tmp_path / "policy.json", clock, read())
    node.desk.occur(XID79)
    assert (node.runner.mode, node.hands.done) == ("observe", [])
    assert "is damaged" in node.runner.answer().trouble


def test_evict_and_rejoin_in_a_loop_end_out_of_the_job(node: Node) -> None:
    for _ in range(6):
        node.desk.occur(XID79)
        node.wait(40)
        node.well()
        node.wait(1)
        node.wait(40)
    assert node.hands.done == [("evict", "r0"), ("rejoin", "r0")] * 2 + [("evict", "r0")]
    assert any("the breaker is open: 3 acts" in event.reason for event in node.told("decided"))
    assert sum("breaker" in event.reason for event in node.told("decided")) <= 8, "it is not told every second"
    node.runner.set_mode("observe", "ann", "looked at it")
    node.runner.set_mode("act", "ann", "repaired")
    node.wait(1)
    assert node.hands.done[-1] == ("rejoin", "r0")


def test_what_cannot_be_done_now_is_done_when_it_can(node: Node) -> None:
    node.hands.out = 1
    node.desk.occur(XID79)
    assert "1 of 4 are out already" in node.told("decided")[0].reason
    for _ in range(20):
        node.wait(5)
    assert len(node.told("decided")) == 1
    node.hands.out = 0
    node.wait(61)
    assert node.hands.done == [("evict", "r0")]


def test_a_coordinator_that_does_not_answer_is_asked_again_while_the_verdict_stands(node: Node) -> None:
    node.hands.fails = "no answer in time"
    node.desk.occur(XID79)
    assert "no answer in time" in node.told("failed")[0].reason
    node.hands.fails = ""
    node.wait(2)
    assert node.hands.done == [("evict", "r0")]
    other = Signal("gpu", "gpu 1", "xid.95", Health.UNHEALTHY, "memory", Action.EVICT, ends=Ends.CLEAR)
    node.hands.away.clear()
    node.hands.fails = "no answer in time"
    node.desk.occur(other)
    node.desk.retract("ft-agent", "repaired", lambda signal: signal.object == "gpu 1")
    node.hands.fails = ""
    node.wait(60)
    assert ("evict", "r0") not in node.hands.done[1:], "what is well again needs no act"


def test_a_node_that_is_gone_and_one_that_others_brought_back(node: Node) -> None:
    node.hands.gone = True
    node.desk.occur(XID79)
    assert "node0/gpu 0 is gone" in node.told("decided")[0].reason
    node.hands.gone = False
    node.wait(2)
    node.hands.away.clear()
    node.well()
    node.wait(0)
    node.wait(3)
    assert node.hands.done == [("evict", "r0")]
    assert "r0 is back already" in node.told("released")[0].reason


def test_a_replica_does_not_come_back_to_another_gpu_that_is_broken(node: Node) -> None:
    node.desk.occur(XID79)
    node.desk.occur(Signal("gpu", "gpu 1", "xid.95", Health.UNHEALTHY, "memory", Action.EVICT, ends=Ends.CLEAR))
    node.well()
    node.wait(0)
    node.wait(3)
    assert node.hands.done == [("evict", "r0")]
    assert "gpu 1 is unhealthy" in node.told("decided")[-1].reason


def test_the_first_network_fault_is_tolerated_the_second_within_five_minutes_is_not(node: Node) -> None:
    down = Signal("nic", "nic rail0", "nic.carrier", Health.UNHEALTHY, "no carrier")
    for _ in range(2):
        node.desk.see("nics", [Observed("nic", "nic rail0", "no carrier", Health.UNHEALTHY, signals=(down,))])
        node.wait(1)
        node.desk.see("nics", [Observed("nic", "nic rail0", "up")])
        assert node.hands.done in ([], [("drain", "r0")])
        node.wait(100)
    assert [event.action for event in node.told("decided")][:2] == ["watch", "drain"]
    assert node.hands.done[0] == ("drain", "r0")


HOOKS = """
version: 1
rules:
- {{name: pager, health: [unhealthy], action: watch, hook: [/bin/sh, -c, '{script}'], timeout_s: {timeout_s}}}
"""


def test_one_fault_that_is_decided_about_again_is_not_its_own_second(node: Node) -> None:
    """A restart that could not be done is tried again, and a standing verdict is judged anew in another mode: neither
    is another Xid 31 within a day, or another network fault within five minutes."""
    node.hands.fails = "no answer"
    node.desk.occur(XID31)
    for _ in range(5):
        node.wait(3)
    node.hands.fails = ""
    node.wait(60)
    assert node.hands.done == [("restart", "r0")]
    node.well()
    node.desk.occur(Signal("nic", "nic rail0", "nic.carrier", Health.UNHEALTHY, "no carrier", ends=Ends.CLEAR))
    for mode in ("observe", "act"):
        assert node.runner.set_mode(mode, "op", "drill")
        while not node.runner._heard.empty():
            node.runner.handle(*node.runner._heard.get_nowait())
        node.wait(1)
    assert node.hands.done == [("restart", "r0")]
    assert {event.action for event in node.told("decided")} == {"restart", "watch"}


def test_a_hook_hears_what_it_is_about(tmp_path: Path, clock: FakeClock) -> None:
    script = f'echo "$FTCTL_INCIDENT $FTCTL_OBJECT $FTCTL_CODE" >{tmp_path}/said'
    node = Node(tmp_path / "policy.json", clock, parse(HOOKS.format(script=script, timeout_s=60)))
    incident = node.desk.occur(XID79)
    until(lambda: bool(node.told("acted")), "the hook", 60)
    assert (tmp_path / "said").read_text() == f"{incident} gpu 0 xid.79\n"
    assert node.told("acted")[0].incident == incident


def test_a_hook_that_hangs_is_ended_with_all_that_it_started_and_holds_up_nobody(
    tmp_path: Path, clock: FakeClock
) -> None:
    script = f"sleep 600 & echo $! >{tmp_path}/pid; wait"
    node = Node(tmp_path / "policy.json", clock, parse(HOOKS.format(script=script, timeout_s=0.5)))
    started = time.monotonic()
    node.desk.occur(XID79)
    assert time.monotonic() - started < 30
    until(lambda: bool(node.told("failed")), "its end", 60)
    assert "it hung, and was ended" in node.told("failed")[0].reason
    if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text().strip()):
        until(lambda: _gone(pid), "the end of what it started", 60)
    missing = parse("version: 1\nrules:\n- {name: a, action: watch, hook: [/nowhere/pager]}")
    node = Node(tmp_path / "other.json", clock, missing)
    node.desk.occur(XID79)
    assert "No such file" in node.told("failed")[0].reason


def _gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"
    except OSError:
        return True


def test_a_flood_is_told_and_uses_up_no_memory(node: Node) -> None:
    node.desk.occur(XID63)
    verdict = node.desk.verdicts()[0]
    for _ in range(3 * MAX_QUEUE):
        node.runner.hear(News(verdict))
    node.wait(1)
    assert f"{2 * MAX_QUEUE} verdicts came faster" in node.told("overrun")[0].reason


def job(**states: str) -> JobState:
    replicas = [
        ReplicaState(name=name, state=state, reason="", since=0.0, incarnation=1, slot=0, step=1, nodes=["node0"])
        for name, state in states.items()
    ]
    return JobState(name="lab", state="running", reason="", step=1, term=1, epoch=1, contributors=[], replicas_wanted=3,
                    min_replicas=1, replicas=replicas, stalls=[], settings={})  # fmt: skip


def test_who_counts_as_out() -> None:
    fleet = fleet_of(job(r0="contributing", r1="draining", r2="evicted"), "evict", ("r0", "r2"))
    assert (fleet.size, fleet.out, fleet.away, fleet.problem) == (3, 2, ("r2",), "")
    assert fleet_of(job(r0="contributing", r1="draining"), "rejoin", ("r1",)).away == ("r1",), "it is not back yet"
    assert fleet_of(job(r0="contributing", r1="fetching"), "rejoin", ("r1",)).away == ()
    assert "no hot spare" in fleet_of(job(r0="contributing"), "promote", ("r0",)).problem
    assert fleet_of(job(r0="contributing", r3="spare"), "evict", ("r0",)).spares == 1
    assert fleet_of(job(r0="contributing", r3="spare"), "promote", ("r0",)).problem == ""
    assert "knows no replica r9" in fleet_of(job(r0="contributing"), "evict", ("r9",)).problem


class Log(Node):
    """With a thread of its own, as in an agent."""

    def start(self) -> None:
        self.desk._listeners.clear()
        self.runner.start()

    def settle(self) -> None:
        until(lambda: self.runner._heard.empty() and not self.runner._lost, "the policy is through")


@pytest.mark.parametrize("code", ["31", "79"])
def test_a_flood_of_equal_lines_heard_on_two_ways_is_one_decision_and_one_act(
    tmp_path: Path, clock: FakeClock, code: str
) -> None:
    node = Log(tmp_path / "policy.json", clock, read())
    node.start()
    signal = replace({"31": XID31, "79": XID79}[code], process="4711", injected=False, fault="")
    try:
        ways = [threading.Thread(target=flood, args=(node.desk, replace(signal, via=via))) for via in ("nvml", "kmsg")]
        for way in ways:
            way.start()
        for way in ways:
            way.join()
        node.settle()
    finally:
        node.runner.close()
    (verdict,) = node.desk.verdicts()
    assert verdict.count == 5000
    assert len(node.told("decided")) == 1
    assert node.hands.done == [("restart" if code == "31" else "evict", "r0")]


def flood(desk: HealthDesk, signal: Signal) -> None:
    for _ in range(5000):
        desk.occur(signal)


def test_what_was_not_heard_in_a_flood_is_decided_about_after_it(node: Node) -> None:
    node.desk._listeners.clear()
    node.desk.listen(node.runner.hear)
    node.desk.occur(XID63)
    recorded = News(node.desk.verdicts()[0])
    for _ in range(MAX_QUEUE):
        node.runner.hear(recorded)
    node.desk.occur(XID79)  # finds no room
    while not node.runner._heard.empty():
        node.runner.handle(*node.runner._heard.get_nowait())
    assert node.hands.done == []
    node.wait(1)
    assert node.hands.done == [("evict", "r0")]
    assert [event.action for event in node.told("decided")] == ["watch", "evict"]
    node.runner.hear(recorded)
    node.runner._lost = 1
    node.wait(1)
    assert len(node.told("decided")) == 2, "each of them once"


@pytest.mark.parametrize("before", ["act", "observe"])
def test_a_mode_that_is_set_restarts_nothing_for_what_happened_before(
    tmp_path: Path, clock: FakeClock, before: str
) -> None:
    """The line of an Xid 31 stands for a minute; the process that it was about is long gone when somebody says act."""
    node = Node(tmp_path / "policy.json", clock, read(), before)
    node.desk.occur(XID31)
    done = list(node.hands.done)
    node.wait(31)
    for mode in ("recommend", "act"):
        assert node.runner.set_mode(mode, "ann", "trust it")
        while not node.runner._heard.empty():
            node.runner.handle(*node.runner._heard.get_nowait())
        node.wait(1)
    assert node.hands.done == done == ([("restart", "r0")] if before == "act" else [])
    assert "not done: it was decided about when it happened" in node.told("decided")[-1].reason
    node.wait(120)
    node.desk.tick()
    node.desk.occur(replace(XID31, object="gpu 1"))
    assert node.hands.done == [*done, ("restart", "r0")], "the next one is another matter"


def test_the_hook_of_a_restart_that_is_not_made_up_for_is_not_called(tmp_path: Path, clock: FakeClock) -> None:
    script = f"echo called >>{tmp_path}/said"
    rules = f"version: 1\nrules:\n- {{name: r, suggests: [restart], action: restart, hook: [/bin/sh, -c, '{script}']}}"
    node = Node(tmp_path / "policy.json", clock, parse(rules), "act")
    node.desk.occur(XID31)
    until(lambda: len(node.told("acted")) == 2, "the restart and the hook", 60)
    for mode in ("observe", "act"):
        assert node.runner.set_mode(mode, "ann", "trust it")
        while not node.runner._heard.empty():
            node.runner.handle(*node.runner._heard.get_nowait())
    node.runner.close()
    assert node.hands.done == [("restart", "r0")]
    assert (tmp_path / "said").read_text() == "called\n"
