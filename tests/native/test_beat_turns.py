"""When a path sends a heartbeat and which connections it asks about: no socket, no clock."""

from __future__ import annotations

import itertools
import random

import pytest

from ftar_core.native import core

from .cluster import options

MOST = 60  # ends in one ping


class Turns:
    """BeatTurns with a hand that turns the clock; the peer answers unless told otherwise."""

    def __init__(self, ends: int, heartbeat_ms: int = 50) -> None:
        self.now = 1000.0
        self.turns = core.BeatTurns(options(heartbeat_ms=heartbeat_ms), MOST, self.now)
        for end in range(ends):
            self.turns.join(end)
        self.sent: list[tuple[float, list[int]]] = []

    def run(self, ms: float, answers: bool = True, step: float = 2) -> list[tuple[float, list[int]]]:
        """The pings of this time."""
        end, begun = self.now + ms, len(self.sent)
        while self.now < end:
            self.now += step
            if ends := self.turns.next(self.now):
                self.sent.append((self.now, ends))
                if answers:
                    self.turns.heard(self.now + 1)
        return self.sent[begun:]


def asked(pings: list[tuple[float, list[int]]]) -> set[int]:
    return {end for _, ends in pings for end in ends}


@pytest.mark.parametrize("ends", [1, 60, 64, 256, 5000])
def test_the_number_of_pings_does_not_grow_with_the_number_of_connections(ends: int) -> None:
    turns = Turns(ends)
    turns.run(2000)  # whoever connected has asked
    assert 19 <= len(turns.run(1000)) <= 21


def test_every_connection_has_its_turn_before_any_has_its_second() -> None:
    turns = Turns(256)
    turns.run(500)
    order = [end for _, ends in turns.run(2000) for end in ends]
    assert len(order) > 2 * 256
    for at in range(0, len(order) - 256, 256):
        assert sorted(order[at : at + 256]) == list(range(256))


def test_who_connects_asks_at_once_and_pings_keep_their_distance() -> None:
    turns = Turns(0)
    assert turns.run(100) == []
    dice = random.Random(1)
    for end in range(200):
        turns.turns.join(end)
        turns.run(dice.choice([0, 2, 4, 20]))
    turns.run(30)
    times = [at for at, _ in turns.sent]
    assert asked(turns.sent) == set(range(200))
    assert min(b - a for a, b in itertools.pairwise(times)) >= 10
    turns.turns.join(1000)
    ((_, ends),) = turns.run(12)
    assert ends[0] == 1000


def test_after_a_silent_gap_every_connection_asks_once_and_soon() -> None:
    turns = Turns(256)
    turns.run(1000)
    silent = turns.run(400, answers=False)
    assert 7 <= len(silent) <= 9, "nobody hurries while nobody answers"
    begun = turns.now
    turns.turns.heard(turns.now)
    round_ = [(at, ends) for at, ends in turns.run(100) if at - begun <= 60]
    assert asked(round_) == set(range(256)), "five pings, ten milliseconds apart"
    assert len(round_) <= 6
    assert 19 <= len(turns.run(1000)) <= 21, "and then as ever"


def test_after_our_own_sleep_every_connection_asks_once() -> None:
    turns = Turns(120)
    turns.run(1000)
    turns.now += 3000  # this process did not run
    assert asked(turns.run(30)) == set(range(120))


def test_a_connection_that_the_peer_misses_makes_everybody_ask() -> None:
    turns = Turns(120)
    turns.run(1000)
    turns.turns.round()
    assert asked(turns.run(30)) == set(range(120))


def test_a_rail_that_is_to_be_proven_gets_its_echoes_sooner_but_not_for_ever() -> None:
    turns = Turns(64, heartbeat_ms=1000)
    turns.run(5000)
    for _ in range(100):
        turns.turns.hurry(20)
        turns.run(4)
    assert 18 <= len([at for at, _ in turns.sent if at > turns.now - 400]) <= 21
    assert len(turns.run(5000)) <= 6


def test_frequent_heartbeats_are_sent_as_they_are_wished() -> None:
    turns = Turns(300, heartbeat_ms=4)
    assert 200 <= len(turns.run(1000)) <= 260


@pytest.mark.parametrize("seed", range(10))
def test_who_left_is_never_asked_about_and_nobody_is_forgotten(seed: int) -> None:
    dice = random.Random(seed)
    turns = Turns(0)
    here: set[int] = set()
    last: dict[int, float] = {}
    for end in range(1500):
        if dice.random() < 0.55:
            turns.turns.join(end)
            here.add(end)
            last[end] = turns.now
        elif here:
            gone = dice.choice(sorted(here))
            here.remove(gone)
            turns.turns.leave(gone)
        if dice.random() < 0.02:
            turns.turns.round()
        for at, ends in turns.run(dice.choice([0, 2, 6, 40]), answers=dice.random() < 0.9):
            assert set(ends) <= here
            assert len(ends) == len(set(ends)) == min(len(here), MOST)
            last.update(dict.fromkeys(ends, at))
    turns.run(50 * (len(here) // MOST + 2))
    assert here <= asked(turns.sent)
