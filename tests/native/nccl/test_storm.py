"""A short storm with a fixed seed. `make storm FAULTS=1000` and `make test-native` have the long ones."""

from __future__ import annotations

import os
import random

import pytest

from ..net import NAMESPACES
from . import churn, weather
from .storm import Settings, Storm

pytestmark = NAMESPACES
PAUSES_MS = (10, 40, 100)  # it shares the machine with the other tests


@pytest.mark.parametrize("rails", [2, 3])
def test_one_seed_is_one_plan_with_every_kind_of_fault(rails: int) -> None:
    def plans(seed: int) -> tuple[list[weather.Round], list[churn.Visit]]:
        dice = random.Random(seed)
        return weather.plan(dice, 200, rails, True), churn.plan(dice, 60, rails)

    assert plans(5) == plans(5)
    assert plans(5) != plans(6)
    rounds, visits = plans(5)
    faults = [f for r in rounds for f in r.faults]
    assert len(faults) >= 200
    assert {f.kind for f in faults} == {"down", "silent", "slow", "corrupt", "freeze"}
    assert {(f.node, f.rail) for f in faults if f.kind == "down"} == {(n, r) for n in (0, 1) for r in range(rails)}
    assert any(len(r.faults) == weather.CYCLES for r in rounds)
    assert {v.what for v in visits} == set(churn._ACTS)
    for r in rounds:  # what begins ends, and nothing is broken twice at one place
        depth: dict[tuple[str, int, int], int] = {}
        for _, f, begins in r.timeline():
            place = (f.kind, f.node, f.rail)
            depth[place] = depth.get(place, 0) + (1 if begins else -1)
            assert depth[place] in {0, 1}, r
        assert set(depth.values()) == {0}


def test_a_storm_costs_no_byte_and_leaves_nothing() -> None:
    settings = Settings(seed=1, faults=25, pauses_ms=PAUSES_MS, heavy="FTAR_TEST_BUILD" in os.environ)
    result = Storm(settings).run()
    assert result.faults >= 25
    assert result.moves > 0  # of data to another rail: the faults were felt
    assert result.visits > 0
