"""Every batch exactly once, against a dumb twin that keeps lists."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ftar_core.protocol import sampler
from ftar_core.wire.messages import Deal

NAMES = ["r0", "r1", "r2", "r3"]
members = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(sorted)


def test_the_first_deal_gives_each_contributor_its_own_batch() -> None:
    deal = sampler.first(["r0", "r1"])
    assert (deal.batches, deal.cursor, deal.returned) == ({"r0": 0, "r1": 1}, 2, ())


def test_a_batch_of_a_lost_contributor_is_dealt_first() -> None:
    deal = sampler.first(["r0", "r1", "r2"])
    following = sampler.following(deal, ["r0", "r2"], ["r0", "r2"])
    assert following.batches == {"r0": 1, "r2": 3}
    assert (following.cursor, following.returned) == (4, ())


def test_more_batches_come_back_than_can_be_dealt_and_keep_their_order() -> None:
    deal = sampler.first(NAMES)
    following = sampler.following(deal, ["r3"], ["r3"])
    assert (following.batches, following.returned) == ({"r3": 0}, (1, 2))
    later = sampler.following(following, ["r3"], ["r0", "r3"])
    assert later.batches == {"r0": 1, "r3": 2}


def test_dealing_the_same_step_again_gives_out_the_same_batches() -> None:
    deal = sampler.first(["r0", "r1"])
    again = sampler.again(deal, ["r2"])
    assert (again.batches, again.returned, again.cursor) == ({"r2": 0}, (1,), 2)


@given(st.lists(st.tuples(members, members), min_size=1, max_size=30))
def test_every_batch_is_trained_once_or_waits(history: list[tuple[list[str], list[str]]]) -> None:
    deal = sampler.first(NAMES)
    trained: list[int] = []
    waiting: list[int] = []  # the dumb twin: batches that came back, oldest first
    fresh = 4
    for committed, following in history:
        trained += [b for r, b in deal.batches.items() if r in committed]
        waiting += [b for r, b in deal.batches.items() if r not in committed]
        deal = sampler.following(deal, committed, following)
        expected = {}
        for replica in following:
            if waiting:
                expected[replica] = waiting.pop(0)
            else:
                expected[replica], fresh = fresh, fresh + 1
        assert deal.batches == expected
        assert list(deal.returned) == waiting
        assert deal.cursor == fresh
    assert len(trained) == len(set(trained))
    assert set(trained) | set(deal.batches.values()) | set(deal.returned) == set(range(deal.cursor))


def test_a_later_job_goes_on_where_an_earlier_one_ended() -> None:
    start = Deal(batches={}, cursor=7, returned=(3, 5), limit=8)
    deal = sampler.first(["r0", "r1", "r2", "r3"], start)
    assert deal.batches == {"r0": 3, "r1": 5, "r2": 7}, "what came back first; r3 has no batch: there are only 8"
    assert sampler.exhausted(deal, ["r0", "r1", "r2", "r3"])
    assert not sampler.exhausted(deal, ["r0", "r2", "r3"])
    assert sampler.following(deal, ["r0", "r2", "r3"], ["r0", "r2", "r3"]).batches == {"r0": 5}


@given(st.integers(1, 30), st.integers(0, 2**32))
def test_data_with_an_end_is_trained_once_and_the_end_is_noticed(limit: int, seed: int) -> None:
    rng = random.Random(seed)
    deal = sampler.first(NAMES[: rng.randrange(1, 5)], Deal(batches={}, cursor=0, limit=limit))
    trained: list[int] = []
    for _ in range(200):
        committed = [r for r in deal.batches if rng.random() < 0.7]
        trained += [deal.batches[r] for r in committed]
        assert sampler.exhausted(deal, committed) == (set(trained) == set(range(limit)))
        if sampler.exhausted(deal, committed):
            break
        deal = sampler.following(deal, committed, sorted(rng.sample(NAMES, rng.randrange(1, 5))))
        assert deal.batches, "no step without data"
    else:
        raise AssertionError("200 steps for 30 batches")
    assert sorted(trained) == list(range(limit))
