"""Deals where an update is of a fixed number of batches, however many contribute."""

from __future__ import annotations

import random

from ftar_core.protocol import sampler
from ftar_core.wire.messages import Deal


def test_four_batches_an_update_on_four_on_three_and_on_one() -> None:
    deal = sampler.first(("a", "b", "c", "d"), Deal(batches={}, cursor=0, round=4))
    assert deal.batches == {"a": 0, "b": 1, "c": 2, "d": 3}
    deal = sampler.following(deal, ("a", "b", "c"), ("a", "b", "c"))  # d was lost: its batch is due in this update
    assert deal.batches == {"b": 3}
    assert deal.left == 1
    deal = sampler.following(deal, ("a", "b", "c"), ("a", "b", "c"))
    assert (deal.batches, deal.left) == ({"a": 4, "b": 5, "c": 6}, 4)
    deal = sampler.following(deal, ("a", "b", "c"), ("a", "b", "c"))
    assert (deal.batches, deal.left) == ({"b": 7}, 1)
    deal = sampler.following(deal, ("a", "b", "c"), ("b",))
    for batch in (8, 9, 10, 11, 12):
        assert deal.batches == {"b": batch}
        deal = sampler.following(deal, ("b",), ("b",))


def test_the_end_of_the_data_ends_the_last_update() -> None:
    deal = sampler.first(("a", "b"), Deal(batches={}, cursor=0, limit=5, round=3))
    lefts = []
    while not sampler.exhausted(deal, deal.batches):
        lefts.append(deal.left)
        deal = sampler.following(deal, deal.batches, ("a", "b"))
    lefts.append(deal.left)
    assert lefts == [3, 1, 3]
    assert sampler.following(deal, deal.batches, ("a", "b")).left == 3, "complete, though one is missing"


def test_whatever_is_lost_no_step_crosses_the_end_of_an_update_and_nobody_starves() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        everybody = [f"r{i}" for i in range(chance.randint(1, 6))]
        size = chance.randint(1, 9)
        deal = sampler.first(everybody, Deal(batches={}, cursor=0, round=size))
        trained: list[int] = []
        idle = dict.fromkeys(everybody, 0)
        for _ in range(60):
            assert 1 <= len(deal.batches) <= deal.left <= size
            assert len(trained) // size == (len(trained) + len(deal.batches) - 1) // size
            lost = [name for name in everybody if chance.random() < 0.1][: len(everybody) - 1]
            used = [name for name in everybody if name not in lost]
            if not any(name in deal.batches for name in used):
                used = everybody
            trained += [batch for name, batch in deal.batches.items() if name in used]
            for name in everybody:
                idle[name] = 0 if name in deal.batches else idle[name] + 1
            assert max(idle.values()) <= 2 * len(everybody) + 2
            deal = sampler.following(deal, used, everybody)
        assert len(set(trained)) == len(trained)
        assert set(trained) | set(deal.returned) | set(deal.batches.values()) == set(range(deal.cursor))
