"""What a batch number stands for, and the few numbers that say what is trained."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftar_core.errors import FtarError, SettingsError, StateMismatch
from ftar_core.protocol import sampler
from ftar_core.training.data import BatchSampler, Source
from ftar_core.training.restore import load_state
from ftar_core.training.sampling import batch_indices
from ftar_core.training.state import check_transferable
from ftar_core.training.stream import Stream
from ftar_core.wire.messages import Deal

from .sources import encode_state


def all_of(source: BatchSampler) -> list[list[int]]:
    return [source.indices(number) for number in range(source.total)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def test_the_last_samples_of_a_pass_are_shared_short_or_dropped() -> None:
    whole = all_of(BatchSampler(10, 4, passes=2))
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4]
    assert Counter(flat(whole)) == dict.fromkeys(range(10), 2)
    assert [len(batch) for batch in all_of(BatchSampler(10, 4, passes=1))] == [4, 4, 2]
    short = BatchSampler(10, 4, passes=2, drop_last=False)
    assert [len(batch) for batch in all_of(short)] == [4, 4, 2, 4, 4, 2]
    assert [short.weight(number) for number in range(6)] == [1, 1, 0.5, 1, 1, 0.5]
    assert sorted(flat(all_of(short)[:3])) == sorted(flat(all_of(short)[3:])) == list(range(10))
    assert all_of(short)[:3] != all_of(short)[3:], "each pass has its own order"
    dropped = BatchSampler(10, 4, passes=2, drop_last=True)
    assert [len(batch) for batch in all_of(dropped)] == [4, 4, 4, 4]
    assert max(Counter(flat(all_of(dropped)[:2])).values()) == 1
    assert [len(source) for source in (BatchSampler(10, 4), short, dropped)] == [3, 3, 2]


def test_the_order_is_that_of_a_session_without_a_sampler() -> None:
    source = BatchSampler(10, 4, seed=7)
    assert [source.indices(n) for n in range(9)] == [batch_indices(n, 4, 10, 7) for n in range(9)]
    assert flat([BatchSampler(10, 4, shuffle=False).indices(n) for n in range(3)]) == [*range(10), 0, 1]


@given(st.data())
def test_a_state_of_a_few_numbers_is_enough_to_go_on_with_any_number_of_replicas(data: st.DataObject) -> None:
    """Train a while, save, start again with others, until all is trained: every batch once."""
    names = [f"r{i}" for i in range(5)]
    some = st.integers(1, 5).map(lambda count: names[:count])
    source = BatchSampler(40, 2, passes=1)
    trained: list[int] = []
    for _ in range(200):
        assert source.trained == len(trained)
        members = data.draw(some)
        deal = sampler.first(members, source.begin())
        for _ in range(data.draw(st.integers(1, 4))):
            committed = data.draw(some)
            trained += [batch for name, batch in deal.batches.items() if name in committed]
            if sampler.exhausted(deal, committed):
                break
            members = data.draw(some)
            deal = sampler.following(deal, committed, members)
            source.stands_at(deal)
        if len(trained) >= 20:
            break
        state = source.state_dict()
        check_transferable({"data": source})
        source = BatchSampler(40, 2, passes=1)
        source.load_state_dict(state)
        assert source.state_dict() == state
    assert sorted(trained) == list(range(20))


def test_without_a_loss_the_state_does_not_grow() -> None:
    source = BatchSampler(1000, 2)
    names = ["r0", "r1", "r2"]
    deal = sampler.first(names)
    for _ in range(50):
        deal = sampler.following(deal, names, names)
        source.stands_at(deal)
    assert (source.state_dict()["next"], source.state_dict()["waiting"]) == (150, [])
    source.stands_at(sampler.following(deal, ["r0", "r2"], ["r0", "r2"]))
    assert (source.state_dict()["next"], source.state_dict()["waiting"]) == (153, [151])


def test_it_travels_with_the_model_and_is_checked_there() -> None:
    def parts(batch_size: int) -> dict[str, Any]:
        return {"model": torch.nn.Linear(1, 1), "data": BatchSampler(100, batch_size)}

    there, here, other = parts(4), parts(4), parts(5)
    there["data"].stands_at(Deal(batches={"r0": 7, "r1": 2}, cursor=9))
    load_state(here, encode_state(there))
    assert here["data"].begin() == Deal(batches={}, cursor=9, returned=(2, 7))
    with pytest.raises(StateMismatch, match="the data here has batch_size=5, its state batch_size=4"):
        load_state(other, encode_state(there))


STATE = BatchSampler(100, 4, seed=1).state_dict()
STREAM = Stream(iter([]), name="c4").state_dict()


@pytest.mark.parametrize(
    ("source", "state", "problem"),
    [
        (BatchSampler(90, 4, seed=1), STATE, "the data here has samples=90, its state samples=100"),
        (BatchSampler(100, 8, seed=1), STATE, "the data here has batch_size=8, its state batch_size=4"),
        (BatchSampler(100, 4, seed=2), STATE, "the data here has seed=2, its state seed=1"),
        (BatchSampler(100, 4, seed=1, shuffle=False), STATE, "has shuffle=False, its state shuffle=True"),
        (BatchSampler(100, 4, seed=1, drop_last=False), STATE, "has drop_last=False, its state drop_last=None"),
        (BatchSampler(100, 4, seed=1), {**STATE, "colour": 1}, "unknown colour"),
        (BatchSampler(100, 4, seed=1), {k: v for k, v in STATE.items() if k != "next"}, "missing next"),
        (BatchSampler(100, 4, seed=1), {**STATE, "next": -1}, "next=-1: a number of at least 0"),
        (BatchSampler(100, 4, seed=1), {**STATE, "next": True}, "next=True: a number of at least 0"),
        (BatchSampler(100, 4, seed=1), {**STATE, "next": 3, "waiting": [1, 3]}, "different numbers below next=3"),
        (BatchSampler(100, 4, seed=1), {**STATE, "next": 3, "waiting": [1, 1]}, "different numbers below next=3"),
        (BatchSampler(100, 4, seed=1), {**STATE, "waiting": "01"}, "different numbers below next=0"),
        (BatchSampler(100, 4, seed=1), STREAM, "is of 'stream', this is 'samples'"),
        (BatchSampler(100, 4, seed=1), {}, "is of None, this is 'samples'"),
        (Stream(iter([]), name="c5"), STREAM, "the data here has name='c5', its state name='c4'"),
        (Stream(iter([]), name="c4", rank=0, ranks=2), STREAM, "has items_per_batch=2, its state items_per_batch=1"),
    ],
)
def test_a_state_of_other_data_is_one_line_and_changes_nothing(
    source: Source, state: dict[str, object], problem: str
) -> None:
    before = source.state_dict()
    with pytest.raises(StateMismatch, match=problem) as caught:
        source.load_state_dict(state)
    assert caught.value.hint or "expected" in str(caught.value)
    assert source.state_dict() == before


class NoLength:
    def __len__(self) -> int:
        raise TypeError("this one is endless")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: BatchSampler(iter([1]), 4), "a list_iterator has no length"),
        (lambda: BatchSampler(NoLength(), 4), "the length of the NoLength is not known: this one is endless"),
        (lambda: BatchSampler([], 4), "empty"),
        (lambda: BatchSampler(True, 4), "a bool has no length"),
        (lambda: BatchSampler(10, 0), "batch_size=0: a number of at least 1"),
        (lambda: BatchSampler(10, 2.5), r"batch_size=2\.5: a number of at least 1"),
        (lambda: BatchSampler(10, 2, passes=-1), "passes=-1: a number of at least 0"),
        (lambda: BatchSampler(10, 2, seed="x"), "seed='x'"),
        (lambda: BatchSampler(10, 20, drop_last=True), "drop_last leaves no batch"),
        (lambda: BatchSampler(10, 2, rank=1), "rank and ranks belong together"),
        (lambda: BatchSampler(10, 2, rank=2, ranks=2), "rank=2 of ranks=2"),
        (lambda: BatchSampler(10, 3, rank=0, ranks=2), "batch_size=3 cannot be shared by 2 ranks"),
        (lambda: BatchSampler(13, 4, drop_last=False, rank=0, ranks=2), "the last batch has 1 samples, which 2 ranks"),
        (lambda: Stream(5), "a int is no stream"),
        (lambda: Stream(io.BytesIO()), r"a file is no stream of batches: its seek\(\) counts bytes"),
        (lambda: Stream([], batches=-1), "batches=-1: a number of at least 0"),
        (lambda: Stream([], workers=True), "workers=True"),
    ],
)
def test_impossible_data_is_refused_at_once(make: Any, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        make()


def test_data_that_is_trained_already_cannot_be_begun() -> None:
    source = BatchSampler(10, 5, passes=1)
    source.load_state_dict({**source.state_dict(), "next": 2})
    with pytest.raises(FtarError, match="all 2 batches of the data are trained already"):
        source.check_begin()
    more = BatchSampler(10, 5, passes=2)
    more.load_state_dict(source.state_dict())
    more.check_begin()
    assert sampler.first(["r0"], more.begin()).batches == {"r0": 2}


def test_a_stream_s_state_may_be_loaded_before_the_ranks_of_the_replica_are_known() -> None:
    saved: Stream[int] = Stream(iter([]), rank=1, ranks=2)
    saved.stands_at(Deal(batches={"r0": 4}, cursor=5))
    later: Stream[int] = Stream(iter([]))
    later.load_state_dict(saved.state_dict())
    later.bind(0, 2)
    assert later.begin() == saved.begin() == Deal(batches={}, cursor=4)
    other: Stream[int] = Stream(iter([]))
    other.load_state_dict(saved.state_dict())
    with pytest.raises(StateMismatch, match="has items_per_batch=4, its state items_per_batch=2"):
        other.bind(0, 4)
