"""The verdict on a rail, without a socket or a clock: whatever happens, from whatever state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from ftar_core.native import core

from .cluster import options

LOSSES = {"CarrierLost", "Silent", "SocketError", "PeerNotice"}
SETTINGS = {"heartbeat_ms": 50, "heartbeat_misses": 3, "hold_down_ms": 1000, "hold_down_max_ms": 60000}


class Link:
    """A LinkHealth with two rails and a hand that turns the clock."""

    def __init__(self, rails: int = 2, connect: bool = True, **settings: int) -> None:
        self.now = 1000.0
        self.health = core.LinkHealth(rails, options(**{**SETTINGS, **settings}), self.now)
        self.rails = range(rails)
        if connect:
            for rail in self.rails:
                self.health.connected(rail, self.now)
            self.health.take_changes()

    def run(self, ms: float, hear: tuple[int, ...] = (), step: float = 10) -> None:
        """Time passes; the peer is heard on these rails."""
        end = self.now + ms
        while self.now < end:
            self.now = min(end, self.now + step)
            for rail in hear:
                self.health.heard(rail, self.now)
            self.health.tick(self.now)

    def states(self) -> list[str]:
        return [self.health.state(rail) for rail in self.rails]

    def probe(self, rail: int, echoes: int = 5) -> None:
        """A repair: DOWN, tried again, connected, answered."""
        self.run(60, hear=tuple(r for r in self.rails if r != rail))
        assert self.health.state(rail) == "PROBING"
        assert self.health.may_connect(rail, self.now)
        self.health.connected(rail, self.now)
        for _ in range(echoes):
            self.health.echo(rail, self.now)


def test_the_table_is_complete_and_every_loss_leads_down() -> None:
    table = core.rail_table()
    rows = {(state, event): to for state, event, to in table}
    assert len(rows) == len(table), "two rows for one case"
    for state, event in itertools.product(["PROBING", "HOLD", "UP"], LOSSES):
        assert rows[state, event] == "DOWN"
    assert not [row for row in table if row[0] == "DOWN" and row[2] != "PROBING"], (
        "DOWN is left by a fresh attempt only"
    )
    assert {event for state, event, to in table if to == "UP"} == {"FirstConnected", "HoldOver", "LastResort"}


def test_a_new_link_is_up_when_connected_without_proof() -> None:
    link = Link(connect=False)
    assert link.states() == ["PROBING", "PROBING"]
    link.health.connected(1, link.now)
    assert link.states() == ["PROBING", "UP"]
    assert link.health.preferred() == 1
    link.health.connected(0, link.now)
    assert link.health.preferred() == 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_kind_of_loss_takes_the_rail_down_and_says_why(loss: str) -> None:
    link = Link()
    if loss == "CarrierLost":
        link.health.carrier(0, False, "rail0 has no carrier", link.now)
    elif loss == "SocketError":
        link.health.closed(0, "connection reset by the peer", link.now)
    elif loss == "PeerNotice":
        link.health.notice(0, "rail0 has no carrier", link.now)
    else:
        link.run(160, hear=(1,))
    ((rail, event, state, reason, _),) = link.health.take_changes()
    assert (rail, event, state) == (0, loss, "DOWN")
    assert link.states() == ["DOWN", "UP"]
    assert link.health.preferred() == 1
    expected = {
        "CarrierLost": "no carrier",
        "SocketError": "reset",
        "PeerNotice": "the peer says: rail0 has no carrier",
        "Silent": "silent for 150 ms",
    }
    assert expected[loss] in reason


def test_silence_is_judged_after_three_missed_heartbeats_not_before() -> None:
    link = Link()
    link.run(140, hear=(1,))
    assert link.states() == ["UP", "UP"]
    link.run(10, hear=(1,))
    assert link.states() == ["DOWN", "UP"]


def test_all_rails_silent_at_once_is_the_peer_and_moves_nothing() -> None:
    link = Link()
    link.run(300)
    assert link.states() == ["UP", "UP"]
    # It wakes up: rail 1 speaks first, and must not convict rail 0.
    link.health.heard(1, link.now)
    link.health.tick(link.now)
    link.run(30, hear=(1,))
    assert link.states() == ["UP", "UP"]
    link.run(100, hear=(0, 1))
    assert link.states() == ["UP", "UP"]
    assert link.health.take_changes() == []


def test_a_rail_that_stays_silent_after_the_peer_woke_up_is_down_all_the_same() -> None:
    link = Link()
    link.run(300)
    link.run(160, hear=(1,))
    assert link.states() == ["DOWN", "UP"]


def test_our_own_sleep_is_not_the_peers_silence() -> None:
    link = Link()
    link.run(40, hear=(0, 1))
    link.now += 400  # this process did not run
    link.health.heard(1, link.now)  # what waits in the sockets is read before the timers
    link.health.tick(link.now)
    assert link.states() == ["UP", "UP"]


def test_a_link_with_one_rail_is_never_down_by_silence_but_becomes_unreachable() -> None:
    link = Link(rails=1)
    link.run(340)
    assert link.states() == ["UP"]
    assert link.health.unreachable(link.now) == ""
    link.run(20)
    assert "all rails have been dead for" in link.health.unreachable(link.now)
    link.health.heard(0, link.now)
    assert link.health.unreachable(link.now) == ""


def test_unreachable_after_200_ms_with_all_rails_dead() -> None:
    link = Link()
    link.health.carrier(0, False, "rail0 has no carrier", link.now)
    link.run(100, hear=(1,))
    link.health.closed(1, "connection timed out", link.now)
    link.run(190)
    assert link.health.unreachable(link.now) == ""
    link.run(20)
    reason = link.health.unreachable(link.now)
    assert "no carrier" in reason
    assert "connection timed out" in reason


def test_a_rail_that_is_up_and_silent_says_so_and_a_link_without_a_rail_that_works_too() -> None:
    link = Link(unreachable_ms=30_000)
    link.run(900)
    assert [link.health.silent_ms(rail, link.now) for rail in link.rails] == [0, 0]  # a busy machine is no news
    link.run(100)
    assert link.states() == ["UP", "UP"]
    assert [link.health.silent_ms(rail, link.now) for rail in link.rails] == [1000, 1000]
    dead_ms, why = link.health.dead(link.now)
    assert (dead_ms, why) == (850, "rail 0: silent for 1000 ms; rail 1: silent for 1000 ms")
    assert link.health.unreachable(link.now) == ""
    link.health.heard(1, link.now)
    assert link.health.dead(link.now)[1] == ""
    assert link.health.silent_ms(0, link.now) == 0  # it gets a fresh period, as ever


def test_what_never_worked_was_not_noticed_after_any_time() -> None:
    link = Link(connect=False)
    link.run(5000)
    link.health.notice(0, "rail0 has no carrier", link.now)
    link.health.carrier(1, False, "rail1 has no carrier", link.now)
    assert [(rail, detect) for rail, _, _, _, detect in link.health.take_changes()] == [(0, -1), (1, -1)]
    # Nor was one that has not come back yet lost once more.
    link = Link()
    link.run(10, hear=(0, 1))
    link.health.closed(0, "reset", link.now)
    link.run(60, hear=(1,))
    link.health.notice(0, "rail0 has no carrier", link.now)
    changes = [(event, detect) for _, event, _, _, detect in link.health.take_changes()]
    assert changes == [("SocketError", 0), ("Retry", 0), ("PeerNotice", -1)]


def test_repair_takes_a_connection_five_echoes_and_the_hold_down() -> None:
    link = Link()
    link.health.carrier(0, False, "rail0 has no carrier", link.now)
    link.run(500, hear=(1,))
    assert link.states() == ["DOWN", "UP"], "without carrier nothing is tried"
    link.health.carrier(0, True, "", link.now)
    link.probe(0, echoes=4)
    assert link.states() == ["PROBING", "UP"]
    link.health.echo(0, link.now)
    assert link.states() == ["HOLD", "UP"]
    assert link.health.preferred() == 1
    link.run(990, hear=(0, 1))
    assert link.states() == ["HOLD", "UP"]
    link.run(20, hear=(0, 1))
    assert link.states() == ["UP", "UP"]
    assert link.health.preferred() == 0


def test_the_hold_down_doubles_with_each_flap_up_to_its_bound_and_decays_when_quiet() -> None:
    link = Link(hold_down_max_ms=5000)
    holds = []
    for _ in range(5):
        link.health.closed(0, "reset", link.now)
        link.probe(0)
        holds.append(link.health.hold_until_ms(0) - link.now)
        link.run(holds[-1] + 20, hear=(0, 1))
        assert link.states() == ["UP", "UP"]
    assert holds == [1000, 2000, 4000, 5000, 5000]
    assert link.health.flaps(0) == 5
    link.run(5 * 5000 + 100, hear=(0, 1), step=40)
    assert link.health.flaps(0) == 0


def test_the_hold_down_is_skipped_when_the_other_rail_dies() -> None:
    link = Link()
    link.health.closed(0, "reset", link.now)
    link.probe(0)
    assert link.states() == ["HOLD", "UP"]
    link.health.closed(1, "reset", link.now)
    assert link.states() == ["UP", "DOWN"]
    assert link.health.reason(0) == "taken at once: no other rail works"


def test_a_connection_without_echoes_yet_is_better_than_nothing() -> None:
    link = Link()
    link.health.closed(0, "reset", link.now)
    link.probe(0, echoes=1)
    assert link.states() == ["PROBING", "UP"]
    link.health.notice(1, "rail1 has no carrier", link.now)
    assert link.states() == ["UP", "DOWN"]


def test_failed_attempts_are_repeated_for_ever_and_keep_their_reason() -> None:
    link = Link()
    link.health.closed(0, "reset", link.now)
    attempts = 0
    for _ in range(1000):
        link.run(10, hear=(1,))
        if link.health.may_connect(0, link.now):
            attempts += 1
            link.health.connecting(0, link.now)
            link.health.connect_failed(0, "connection refused", link.now)
    assert 150 <= attempts <= 200
    assert link.states() == ["PROBING", "UP"]
    assert link.health.reason(0) == "connection refused"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_table_is_obeyed_and_a_living_rail_is_found(seed: int) -> None:
    rows = {(state, event): to for state, event, to in core.rail_table()}
    dice = random.Random(seed)
    link = Link(rails=3, connect=False)
    states = link.states()
    for _ in range(2000):
        link.now += dice.choice([0, 1, 10, 60])
        rail = dice.randrange(3)
        health = link.health
        what = dice.choice(["hear", "hear", "hear", "connect", "close", "up", "off", "echo", "notice", "fail"])
        if what == "hear":
            health.heard(rail, link.now)
        elif what == "connect" and health.may_connect(rail, link.now):
            health.connected(rail, link.now)
        elif what == "close":
            health.closed(rail, "closed", link.now)
        elif what in {"up", "off"}:
            health.carrier(rail, what == "up", "no carrier", link.now)
        elif what == "echo":
            health.echo(rail, link.now)
        elif what == "notice":
            health.notice(rail, "its end is down", link.now)
        elif what == "fail" and health.may_connect(rail, link.now):
            health.connect_failed(rail, "refused", link.now)
        health.tick(link.now)
        for r, event, state, reason, _ in health.take_changes():
            assert rows[states[r], event] == state
            assert reason
            states[r] = state
        assert states == link.states()
        if "HOLD" in states:
            assert "UP" in states, "a rail that could carry data was left in hold-down"


class Way:
    """A way that takes `ms` for each packet, in order, and lets `passes` say which: a SizeTest beside a heartbeat."""

    def __init__(self, ms: float, passes: Callable[[bool], bool]) -> None:
        self.ms, self.passes = ms, passes
        self.test = core.SizeTest()
        self.ping = 0
        self.back: list[tuple[float, bool, int]] = []

    def failed_after(self, until: float = 5000) -> float | None:
        """Milliseconds from the first large packet; None: the test found nothing."""
        now, beat = 0.0, 7.0
        while now < until:
            while self.back and self.back[0][0] <= now:
                _, large, ping = self.back.pop(0)
                (self.test.large_back if large else self.test.small_back)(ping)
            if self.test.failed():
                return now
            if self.test.due(now):
                self._send(True, now)
                self.test.large_sent(self.ping, now)
            if now >= beat:
                beat += 50
                self._send(False, now)
            now += 5
        return None

    def _send(self, large: bool, now: float) -> None:
        self.ping += 1
        if self.passes(large):
            self.back.append((now + self.ms, large, self.ping))


def test_large_packets_that_vanish_are_told_from_small_ones_that_pass() -> None:
    found = Way(1, lambda large: not large).failed_after()
    assert found is not None
    assert found <= 350


@pytest.mark.parametrize("ms", [0, 1, 45, 400, 2000])
def test_a_slow_way_is_only_slow(ms: float) -> None:
    assert Way(ms, lambda _large: True).failed_after() is None
    found = Way(ms, lambda large: not large).failed_after()
    assert found is not None, "and one that loses large packets is found however slow it is"
    assert found <= 350 + ms


def test_a_lossy_way_is_only_lossy() -> None:
    rng = random.Random(1)
    assert sum(Way(1, lambda _large: rng.random() > 0.05).failed_after(1000) is not None for _ in range(500)) == 0


def test_a_way_that_is_dead_is_not_for_this_test() -> None:
    assert Way(1, lambda _large: False).failed_after() is None


def test_answers_of_before_count_for_nothing() -> None:
    test = core.SizeTest()
    for ping in range(10, 16):
        test.large_sent(ping, 0)
    for ping in (1, 9, 12, 15):
        test.small_back(ping)
    test.large_back(9)
    assert not test.failed()
    test.small_back(16)
    assert not test.failed()
    test.small_back(17)
    assert test.failed()
    assert not test.passed()
    test.large_back(11)
    assert test.passed()
    assert not test.failed()
