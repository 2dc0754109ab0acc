"""The life of a fault, told with a network in memory and a clock that the test turns."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from fake_links import FakeClock, FakeLinks, route

from agents.api.words import FaultState
from agents.host.machine import Machine
from agents.injection.deadlines import Deadlines
from agents.injection.guard import Limits
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Entry, Ledger
from agents.injection.lifecycle import MOVES, OPEN, IllegalMove, Move, after
from agents.injection.problems import FaultProblem
from agents.injection.reverting import Reverter
from agents.injection.watchdog import Watchdog

LIMITS = Limits("node1", ("rail0", "rail1"), "mgmt0", max_faults=3, max_duration_s=900)


@dataclass
class Node:
    """An agent's injection side over one ledger directory; `restart` is a new agent over the same directory."""

    machine: Machine
    directory: Path
    events: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.directory)
        reverter = Reverter(self.ledger, self.machine, sleep=lambda _s: None)
        self.injector = Injector(self.ledger, self.machine, LIMITS, self._emit, reverter=reverter)
        self.deadlines = Deadlines(self.injector, self._emit, "node1")

    def _emit(self, kind: str, thing: str, reason: str) -> None:
        self.events.append((kind, thing, reason))

    def start(self) -> Node:
        self.injector.start()
        return self

    def restart(self) -> Node:
        return Node(self.machine, self.directory).start()

    def down(self, nic: str = "rail0", duration_s: float = 30, **kwargs: object) -> Entry:
        values: dict[str, object] = {"kind": "link-down", "owner": "ann", "nic": nic, "duration_s": duration_s}
        return self.injector.inject(Injection(**{**values, **kwargs}))  # type: ignore[arg-type]

    def refused(self, **kwargs: object) -> FaultProblem:
        with pytest.raises(FaultProblem) as caught:
            self.down(**kwargs)  # type: ignore[arg-type]
        return caught.value

    def state(self, entry: Entry) -> FaultState:
        found = self.injector.find(entry.id)
        assert found is not None
        return found.state


@pytest.fixture
def node(machine: Machine, ledger_directory: Path) -> Node:
    return Node(machine, ledger_directory).start()


def on_disk(node: Node) -> list[Entry]:
    return list(node.ledger.read().entries)


# --- the table ----------------------------------------------------------------------------------------------------


def test_a_move_that_is_not_in_the_table_is_an_error() -> None:
    for state in FaultState:
        for move in Move:
            if (state, move) in MOVES:
                assert after(state, move) is MOVES[state, move]
            else:
                with pytest.raises(IllegalMove):
                    after(state, move)
    assert FaultState.REVERTED not in OPEN
    assert all(state is not FaultState.REVERTED for state, _move in MOVES), "a reverted fault stays reverted"


# --- the good path ------------------------------------------------------------------------------------------------


def test_the_undo_is_on_disk_before_the_link_goes_down(node: Node, links: FakeLinks) -> None:
    seen: list[list[Entry]] = []
    down = links.set_up

    def spying(nic: object, *, up: bool) -> None:
        seen.append(on_disk(node))
        down(nic, up=up)  # type: ignore[arg-type]

    links.set_up = spying  # type: ignore[method-assign, assignment]
    entry = node.down()
    assert [e.state for e in seen[0]] == [FaultState.ARMED]
    assert b'"nic":"rail0"' in bytes(seen[0][0].undo).replace(b" ", b"").replace(b"\n", b"")
    assert entry.state is FaultState.ACTIVE
    assert [e.state for e in on_disk(node)] == [FaultState.ACTIVE]
    assert not links.devices[2].up


def test_its_time_is_up(node: Node, links: FakeLinks, clock: FakeClock) -> None:
    entry = node.down(duration_s=30)
    clock.boot += 29.9
    node.deadlines.tick()
    assert node.state(entry) is FaultState.ACTIVE
    clock.boot += 0.2
    node.deadlines.tick()
    assert node.state(entry) is FaultState.REVERTED
    assert links.devices[2].up
    assert node.events[-1][0] == "fault.reverted"
    assert "its time is up" in node.events[-1][2]


def test_a_clock_set_back_by_a_year_extends_nothing(node: Node, clock: FakeClock) -> None:
    entry = node.down(duration_s=30)
    clock.wall -= 365 * 86400
    clock.boot += 31
    node.deadlines.tick()
    assert node.state(entry) is FaultState.REVERTED


def test_reverted_on_command_and_once_more_without_complaint(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    assert node.injector.revert(entry.id, "by ann").state is FaultState.REVERTED
    assert node.injector.revert(entry.id, "by ann").state is FaultState.REVERTED
    assert links.calls.count("up") == 1
    assert links.devices[2].up


def test_a_dry_run_answers_and_leaves_no_trace(node: Node, links: FakeLinks) -> None:
    entry = node.down(dry_run=True)
    assert entry.detail == "would be injected"
    assert links.devices[2].up
    assert on_disk(node) == []
    assert node.injector.entries() == []
    assert node.refused(nic="rail7", dry_run=True).code == "unknown-nic"


def test_a_silent_controller_loses_its_fault_and_a_talking_one_keeps_it(node: Node, clock: FakeClock) -> None:
    entry = node.down(duration_s=60, dead_man_s=5)
    for _ in range(4):
        clock.boot += 4
        node.deadlines.tick()
        assert node.state(entry) is FaultState.ACTIVE
        node.injector.keep_alive(entry.id)
    clock.boot += 5.1
    node.deadlines.tick()
    assert node.state(entry) is FaultState.REVERTED
    assert "silent for 5 s" in node.events[-1][2]


def test_keeping_alive_never_outlives_the_duration(node: Node, clock: FakeClock) -> None:
    entry = node.down(duration_s=10, dead_man_s=5)
    for _ in range(3):
        clock.boot += 4
        node.injector.keep_alive(entry.id)
        node.deadlines.tick()
    assert node.state(entry) is FaultState.REVERTED


def test_the_same_request_twice_is_one_fault(node: Node, links: FakeLinks) -> None:
    first = node.down(request_id="req-1")
    assert node.down(request_id="req-1").id == first.id
    assert links.calls.count("down") == 1
    node.injector.revert("req-1", "by ann")
    assert node.state(first) is FaultState.REVERTED
    assert node.down(request_id="req-1").state is FaultState.REVERTED, "a late repetition must not inject again"


def test_a_request_taken_back_before_it_arrived_is_refused_when_it_does(node: Node, links: FakeLinks) -> None:
    with pytest.raises(FaultProblem) as caught:
        node.injector.revert("req-9", "by ann, interrupted")
    assert caught.value.code == "unknown-fault"
    assert "taken back" in node.refused(request_id="req-9").reason
    assert links.devices[2].up


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "code", "words"),
    [
        ({"duration_s": 0}, "bad-duration", "not above 0"),
        ({"duration_s": -3}, "bad-duration", "not above 0"),
        ({"duration_s": 901}, "bad-duration", "too long"),
        ({"duration_s": math.nan}, "bad-duration", "nan"),
        ({"duration_s": math.inf}, "bad-duration", "inf"),
        ({"dead_man_s": 0.0}, "bad-duration", "dead_man_s"),
        ({"nic": "rail7"}, "unknown-nic", "no network device rail7"),
        ({"nic": ""}, "bad-request", "needs a NIC"),
        ({"nic": "mgmt0"}, "refused", "management NIC"),
        ({"nic": "lo0"}, "unknown-nic", "lo0"),
        ({"kind": "explode"}, "unknown-kind", "no such fault"),
        ({"kind": "noop"}, "bad-request", "takes no nic"),
        ({"replica": "r1"}, "bad-request", "takes no replica"),
        ({"params": {"speed": 3}}, "bad-request", "no parameter speed"),
        ({"request_id": "a/b"}, "bad-request", "letters"),
    ],
)
def test_bad_input_is_refused_in_words_and_changes_nothing(
    node: Node, links: FakeLinks, wish: dict[str, object], code: str, words: str
) -> None:
    problem = node.refused(**wish)
    assert problem.code == code
    assert words in problem.reason
    assert on_disk(node) == []
    assert "down" not in links.calls


def test_only_declared_rails(node: Node, links: FakeLinks) -> None:
    links.add("eth5")
    problem = node.refused(nic="eth5")
    assert (problem.code, problem.reason) == ("refused", "eth5 is not declared as a rail")
    assert "rail0, rail1" in problem.hint


def test_a_rail_with_the_default_route_is_refused_while_no_management_nic_is_named(
    machine: Machine, links: FakeLinks, ledger_directory: Path
) -> None:
    node = Node(machine, ledger_directory)
    node.injector._limits = without_management(LIMITS)
    node.start()
    links.defaults = frozenset({2})
    assert "default route" in node.refused().reason


def without_management(limits: Limits) -> Limits:
    import dataclasses

    return dataclasses.replace(limits, management_nic=None)


def test_a_second_fault_on_the_same_rail_is_refused_with_the_first_ones_name(node: Node) -> None:
    first = node.down()
    problem = node.refused()
    assert problem.code == "refused"
    assert first.id in problem.reason
    assert problem.hint == f"ftctl revert {first.id}"


def test_the_last_healthy_rail_is_kept_unless_told_otherwise(node: Node, links: FakeLinks) -> None:
    links.change(3, carrier=False)
    problem = node.refused()
    assert "last healthy rail" in problem.reason
    assert "--allow-last-rail" in problem.hint
    assert node.down(allow_last_rail=True).state is FaultState.ACTIVE


def test_no_more_faults_than_allowed_at_once(node: Node) -> None:
    for _ in range(3):
        node.down(kind="noop", nic="")
    problem = node.refused()
    assert problem.code == "refused"
    assert "max_faults" in problem.hint


# --- things go wrong ----------------------------------------------------------------------------------------------


def test_a_full_disk_means_no_fault(node: Node, links: FakeLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    problem = node.refused()
    monkeypatch.undo()
    assert problem.code == "ledger"
    assert "No space left" in problem.reason
    assert links.devices[2].up
    assert on_disk(node) == []
    assert [p.name for p in node.directory.iterdir()] == ["lock"]


def test_a_disk_that_fills_up_later_does_not_keep_the_link_down(
    node: Node, links: FakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = node.down()

    def full(_handle: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert node.injector.revert(entry.id, "by ann").state is FaultState.REVERTED
    monkeypatch.undo()
    assert links.devices[2].up
    assert node.state(entry) is FaultState.REVERTED
    assert [e for e in on_disk(node) if e.open] == []


def test_an_injection_of_unknown_outcome_is_taken_back(node: Node, links: FakeLinks) -> None:
    links.broken["down"] = errno.ETIMEDOUT
    problem = node.refused()
    assert problem.code == "failed"
    assert "nothing is in force" in problem.reason
    assert [e.state for e in on_disk(node)] == [FaultState.REVERTED]


def test_an_injection_that_did_nothing_is_no_success(node: Node, links: FakeLinks) -> None:
    links.deaf.add("down")
    problem = node.refused()
    assert problem.code == "failed"
    assert "did not take effect" in problem.reason


def test_what_cannot_be_looked_at_counts_as_in_force(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    links.broken["nics"] = errno.EIO
    node.injector.look()
    found = node.injector.find(entry.id)
    assert found is not None
    assert found.state is FaultState.ACTIVE
    assert found.detail.startswith("may be in force")


def test_a_revert_that_fails_is_stuck_with_commands_and_heals_later(
    node: Node, links: FakeLinks, clock: FakeClock
) -> None:
    links.table = [route("10.9.0.0/16", 2, gateway="10.0.0.2")]
    entry = node.down()
    links.broken["up"] = errno.EBUSY
    stuck = node.injector.revert(entry.id, "by ann")
    assert stuck.state is FaultState.STUCK
    assert "may still be in force" in stuck.detail
    assert stuck.attempts == 6
    assert node.injector.by_hand(stuck) == [
        "ip link set rail0 up",
        "ip route add 10.9.0.0/16 via 10.0.0.2 dev rail0",
    ]
    assert node.events[-1][0] == "fault.stuck"
    node.deadlines.tick()
    del links.broken["up"]
    clock.boot += 25
    node.deadlines.tick()
    assert node.state(entry) is FaultState.REVERTED
    assert links.devices[2].up


def test_a_revert_that_says_yes_and_does_nothing_is_not_believed(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    links.deaf.add("up")
    stuck = node.injector.revert(entry.id, "by ann")
    assert stuck.state is FaultState.STUCK
    assert "rail0 is down" in stuck.detail


def test_a_revert_that_works_at_the_third_attempt_is_not_stuck(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    tries = iter([errno.EBUSY, errno.EBUSY, 0])
    up = links.set_up

    def flaky(nic: object, *, up: bool, _up: Callable[..., None] = up) -> None:
        number = next(tries)
        links.broken = {"up": number} if number else {}
        _up(nic, up=up)

    links.set_up = flaky  # type: ignore[method-assign, assignment]
    reverted = node.injector.revert(entry.id, "by ann")
    assert (reverted.state, reverted.attempts) == (FaultState.REVERTED, 3)


def test_somebody_else_sets_the_link_up_and_the_fault_says_so(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    links.change(2, up=True, carrier=True)
    node.injector.look()
    found = node.injector.find(entry.id)
    assert found is not None
    assert "by somebody else" in found.detail
    assert node.injector.revert(entry.id, "by ann").state is FaultState.REVERTED


def test_a_damaged_entry_is_reported_and_stops_new_faults(node: Node) -> None:
    entry = node.down()
    path = node.directory / f"{entry.id}.json"
    path.write_bytes(path.read_bytes()[:100])
    restarted = node.restart()
    assert [d.path for d in restarted.injector.damaged()] == [path]
    assert restarted.events[0][0] == "ledger.damaged"
    problem = restarted.refused(nic="rail1")
    assert str(path) in problem.reason
    assert path.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 99}', "\x00\x01", "null"])
def test_any_junk_in_the_ledger_is_damage_and_no_crash(machine: Machine, ledger_directory: Path, text: str) -> None:
    ledger_directory.mkdir()
    (ledger_directory / "f-junk.json").write_text(text)
    (ledger_directory / "f-half.new").write_text('{"version": 1, "id"')
    node = Node(machine, ledger_directory).start()
    assert len(node.injector.damaged()) == 1
    assert not (ledger_directory / "f-half.new").exists(), "its fault was never made"


# --- deaths -------------------------------------------------------------------------------------------------------


def test_a_new_agent_takes_back_what_its_predecessor_left(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    restarted = node.restart()
    assert restarted.state(entry) is FaultState.REVERTED
    assert links.devices[2].up
    assert "started anew" in restarted.events[0][2]


def test_killed_between_the_record_and_the_fault(node: Node, links: FakeLinks) -> None:
    def killed(_nic: object, *, up: bool) -> None:
        raise KeyboardInterrupt

    original, links.set_up = links.set_up, killed  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        node.down()
    links.set_up = original  # type: ignore[method-assign]
    assert [e.state for e in on_disk(node)] == [FaultState.ARMED]
    assert node.restart().injector.entries()[0].state is FaultState.REVERTED
    assert links.devices[2].up


def test_killed_between_the_fault_and_its_record(node: Node, links: FakeLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Ledger.write

    def killed_at_active(self: Ledger, entry: Entry) -> None:
        if entry.state is FaultState.ACTIVE:
            raise KeyboardInterrupt
        write(self, entry)

    monkeypatch.setattr(Ledger, "write", killed_at_active)
    with pytest.raises(KeyboardInterrupt):
        node.down()
    assert not links.devices[2].up
    node.restart()
    assert links.devices[2].up


def test_after_a_reboot_there_is_nothing_left_to_undo(node: Node, links: FakeLinks, clock: FakeClock) -> None:
    entry = node.down()
    clock.id, clock.boot = "boot-2", 5.0
    restarted = node.restart()
    found = restarted.injector.find(entry.id)
    assert found is not None
    assert found.state is FaultState.REVERTED
    assert "started anew since" in found.detail
    assert not links.devices[2].up, "whatever the new boot configured is not ours to change"


def test_the_watchdog_waits_for_the_deadline_and_then_reverts(node: Node, links: FakeLinks, clock: FakeClock) -> None:
    node.down(duration_s=10)
    watchdog = Watchdog(node.ledger, node.machine)
    assert watchdog.look(agent_lives=False) == 1
    assert not links.devices[2].up
    clock.boot += 10
    assert watchdog.look(agent_lives=False) == 0
    assert links.devices[2].up
    node.deadlines.tick()
    assert node.injector.entries()[0].state is FaultState.REVERTED, "a living agent sees what the watchdog did"


def test_the_watchdog_steps_in_for_an_agent_that_hangs(node: Node, links: FakeLinks, clock: FakeClock) -> None:
    node.down(duration_s=10)
    watchdog = Watchdog(node.ledger, node.machine)
    clock.boot += 10.5
    assert watchdog.look(agent_lives=True) == 1, "the agent is given a second of its own"
    clock.boot += 1
    assert watchdog.look(agent_lives=True) == 0
    assert links.devices[2].up


def test_a_controller_cannot_reach_a_dead_agent_so_its_dead_man_counts(node: Node, clock: FakeClock) -> None:
    node.down(duration_s=600, dead_man_s=5)
    watchdog = Watchdog(node.ledger, node.machine)
    clock.boot += 6
    assert watchdog.look(agent_lives=False) == 0


def test_agent_watchdog_and_a_second_agent_never_undo_at_the_same_time(node: Node, links: FakeLinks) -> None:
    entry = node.down()
    inside, most = 0, 0
    guard = threading.Lock()
    original = links.set_up

    def slow(nic: object, *, up: bool) -> None:
        nonlocal inside, most
        with guard:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.05)
        original(nic, up=up)  # type: ignore[arg-type]
        with guard:
            inside -= 1

    links.set_up = slow  # type: ignore[method-assign, assignment]
    reverters = [Reverter(Ledger(node.directory), node.machine) for _ in range(4)]
    threads = [threading.Thread(target=r.revert, args=(entry.id, "all at once")) for r in reverters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    assert links.calls.count("up") == 1


def test_ending_takes_everything_back_and_refuses_more(node: Node, links: FakeLinks) -> None:
    node.down()
    node.down(kind="noop", nic="")
    assert node.injector.close() == []
    assert links.devices[2].up
    assert "ending" in node.refused().reason


def test_old_history_is_forgotten_and_open_faults_never(node: Node, clock: FakeClock) -> None:
    reverted = node.down()
    node.injector.revert(reverted.id, "by ann")
    opened = node.down(nic="rail1", duration_s=900)
    clock.wall += 2 * 3600
    node.injector.refresh()
    assert [e.id for e in on_disk(node)] == [opened.id]
    assert [e.id for e in node.injector.entries()] == [opened.id]


def test_an_entry_says_all_that_a_person_needs(node: Node) -> None:
    entry = node.down(reason="drill")
    text = (node.directory / f"{entry.id}.json").read_text()
    for needed in ('"owner": "ann"', '"reason": "drill"', '"rail0"', '"deadline_boot_s"', '"boot_id"'):
        assert needed in text
    assert (node.directory / f"{entry.id}.json").stat().st_mode & 0o077 == 0
    assert msgspec.json.decode(text)["state"] == "active"
