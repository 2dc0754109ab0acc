"""Reading ahead of the deal: what was read and then dealt to another is neither trained twice nor lost."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from ftar_core.errors import FtarError, SettingsError
from ftar_core.protocol import sampler
from ftar_core.training.data import BatchSampler
from ftar_core.training.feed import Feed, Foresight, open_feed
from ftar_core.training.stream import Stream
from ftar_core.wire.messages import Deal

Batch = list[int]


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def unchanged(samples: Batch) -> Batch:
    return samples


class ReadsAhead:
    """As torch's loader with workers does it: `depth` batches are asked for at once, then one for each returned."""

    def __init__(self, source: BatchSampler, depth: int) -> None:
        self.source, self.depth = source, depth
        self.loaded = 0

    def __iter__(self) -> Iterator[Batch]:
        indices = iter(self.source)
        queue: deque[Batch] = deque()
        while not self.depth:  # as without workers: asked for when it is needed
            found = self._one(indices)
            if not found:
                return
            yield found[0]
        for _ in range(self.depth):
            queue.extend(self._one(indices))
        while queue:
            first = queue.popleft()
            queue.extend(self._one(indices))
            yield first

    def _one(self, indices: Iterator[Batch]) -> list[Batch]:
        found = next(indices, None)
        self.loaded += found is not None
        return [] if found is None else [found]


class Replica:
    """One life: a sampler of its own, that knows only what it is told."""

    def __init__(self, name: str, depth: int, **options: Any) -> None:
        self.source = BatchSampler(**options)
        self.loader = ReadsAhead(self.source, depth)
        self.feed: Feed[Batch] = Feed(cast(Any, self.loader), self.source, name)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    passes=st.integers(1, 3),
    drop_last=st.sampled_from([None, False, True]),
    shuffle=st.booleans(),
)
def test_every_sample_is_trained_once_a_pass_however_far_is_read_ahead_and_whoever_is_lost(
    seed: int, samples: int, batch_size: int, passes: int, drop_last: bool | None, shuffle: bool
) -> None:
    if drop_last and batch_size > samples:
        return
    rng = random.Random(seed)
    options = {"dataset": samples, "batch_size": batch_size, "passes": passes, "drop_last": drop_last, "seed": seed}

    def life(name: str) -> Replica:
        return Replica(name, rng.randrange(0, 9), shuffle=shuffle, **options)

    names = ["r0", "r1", "r2", "r3"]
    lives = {name: life(name) for name in names[: rng.randrange(1, 5)]}
    deal = sampler.first(sorted(lives), lives["r0"].source.begin())
    trained: Counter[int] = Counter()
    dumb: list[int] = []  # batch numbers as committed, of which the twin below knows what they are
    for _ in range(1000):
        members = sorted(lives)
        fetched: dict[str, Batch] = {}
        for name in members:
            number = deal.batches.get(name)
            if number is not None:  # (a step without a batch asks for nothing)
                fetched[name] = lives[name].feed.get(number, deal, members)
                assert fetched[name] == lives[name].source.indices(number)
        lost = {name for name in members if rng.random() < 0.08}
        if not deal.batches.keys() - lost:  # nobody with a batch is left: dealt anew to those who are
            lives = {name: life(name) for name in names[: rng.randrange(1, 5)]}
            deal = sampler.again(deal, sorted(lives))
            continue
        committed = [name for name in members if name not in lost]
        for name in committed:
            trained.update(fetched.get(name, []))
            dumb += [deal.batches[name]] if name in deal.batches else []
        if sampler.exhausted(deal, committed):
            break
        lives = {name: lives[name] for name in committed if rng.random() > 0.05} or {committed[0]: lives[committed[0]]}
        for name in names:
            if name not in lives and rng.random() < 0.2:
                lives[name] = life(name)
                if rng.random() < 0.5:
                    lives[name].feed.any()  # a warm-up, before anything is dealt to it
        deal = sampler.following(deal, committed, sorted(lives))
    else:
        raise AssertionError("1000 steps were not enough")
    per_pass = samples // batch_size * batch_size if drop_last else samples
    assert sorted(dumb) == list(range(len(dumb)))
    assert sum(trained.values()) == passes * per_pass
    assert max(trained.values()) <= passes
    if not drop_last:
        assert trained == dict.fromkeys(range(samples), passes)


def test_in_calm_times_nothing_is_read_in_vain() -> None:
    names = ["r0", "r1", "r2"]
    life = Replica("r1", 4, dataset=1000, batch_size=2)
    deal = sampler.first(names)
    for _ in range(50):
        life.feed.get(deal.batches["r1"], deal, names)
        deal = sampler.following(deal, names, names)
    assert life.feed.dropped == 0
    assert life.loader.loaded == 50 + 4


def test_after_a_loss_what_will_still_be_needed_is_kept() -> None:
    life = Replica("r0", 6, dataset=1000, batch_size=1)
    deal = sampler.first(["r0", "r1", "r2"])
    life.feed.get(0, deal, ["r0", "r1", "r2"])  # 3, 6, 9, 12, 15, 18 are read ahead
    deal = sampler.following(deal, ["r0", "r2"], ["r0", "r2"])  # 1 has come back: r0 goes on with 1, 4, 6, 8, ...
    got = []
    for _ in range(10):
        got += life.feed.get(deal.batches["r0"], deal, ["r0", "r2"])
        deal = sampler.following(deal, ["r0", "r2"], ["r0", "r2"])
    assert got == [life.source.indices(number)[0] for number in (1, 4, 6, 8, 10, 12, 14, 16, 18, 20)]
    assert life.feed.dropped == 3, "3, 9 and 15"
    assert not life.feed._aside, "nothing is kept in vain"


@given(st.integers(0, 2**32))
def test_foresight_is_what_the_sampler_then_deals(seed: int) -> None:
    rng = random.Random(seed)
    names = ["r0", "r1", "r2"]
    foresight = Foresight("r1")
    waiting = sorted(rng.sample(range(20), rng.randrange(0, 6)))
    deal = sampler.first(names, Deal(batches={}, cursor=20, returned=tuple(waiting), limit=rng.choice((0, 30))))
    foresight.at(deal, names)
    numbers = foresight.numbers()
    for _ in range(12):
        if "r1" in deal.batches:
            assert next(numbers, None) == deal.batches["r1"]
        if sampler.exhausted(deal, names):
            assert next(numbers, None) is None
            break
        deal = sampler.following(deal, names, names)


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_s_loader_is_understood(workers: int) -> None:
    """Through a loss, a warm-up before it, and the end of the data with a batch that comes back behind it."""
    source = BatchSampler(40, 4, seed=3, passes=1)
    loader = DataLoader(Numbers(40), batch_sampler=source, num_workers=workers, collate_fn=unchanged)
    feed = open_feed(loader, "r0", 0, 1)
    assert feed.any() == source.indices(0)
    both, alone = ["r0", "r1"], ["r0"]
    deal = sampler.first(both, source.begin())
    got = []
    for step in range(1, 6):
        got.append(deal.batches["r0"])
        assert feed.get(deal.batches["r0"], deal, both) == source.indices(deal.batches["r0"])
        committed = alone if step == 5 else both
        deal = sampler.following(deal, committed, committed)
    assert got == [0, 2, 4, 6, 8]
    assert deal.batches == {"r0": 9}, "of the lost one"
    assert feed.get(9, deal, alone) == source.indices(9)
    feed.close()


def bytes_from(item: int) -> Iterator[int]:
    return iter(range(item, 12))


class Resumable:
    """Counts how often it was told where to go."""

    def __init__(self) -> None:
        self.at, self.seeks = 0, 0

    def seek(self, item: int) -> None:
        self.at, self.seeks = item, self.seeks + 1

    def __iter__(self) -> Resumable:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at - 1


class FromTheStart:
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


@pytest.mark.parametrize("make", [lambda: bytes_from, Resumable, FromTheStart])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_read_where_the_deal_says(make: Any, workers: int) -> None:
    stream: Stream[int] = Stream(make(), batches=12, workers=workers)
    feed = open_feed(stream, "r0", 0, 1)
    both, alone = ["r0", "r1"], ["r0"]
    deal = sampler.first(both, stream.begin())
    got = []
    for step in range(8):
        got.append(feed.get(deal.batches["r0"], deal, both if step < 4 else alone))
        deal = sampler.following(deal, both if step < 3 else alone, both if step < 3 else alone)
    assert got == [0, 2, 4, 6, 7, 8, 9, 10], "r1 had 1, 3 and 5, and left 7 behind"
    feed.close()


def test_a_stream_without_seek_goes_back_by_reading_anew_and_an_iterator_cannot() -> None:
    deal = Deal(batches={"r0": 5}, cursor=6, returned=(2,))
    following = Deal(batches={"r0": 2}, cursor=6)
    feed = open_feed(Stream(FromTheStart()), "r0", 0, 1)
    assert (feed.get(5, deal, ["r0"]), feed.get(2, following, ["r0"])) == (5, 2)
    once = open_feed(Stream(iter(range(12))), "r0", 0, 1)
    assert once.get(5, deal, ["r0"]) == 5
    with pytest.raises(FtarError, match="at item 6 and cannot go back to item 2, which a lost replica left") as caught:
        once.get(2, following, ["r0"])
    assert "function of the batch number" in caught.value.hint


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_ends_early_is_one_line_that_says_what_to_do(workers: int) -> None:
    feed = open_feed(Stream(bytes_from, workers=workers), "r0", 0, 1)
    deal = Deal(batches={"r0": 11}, cursor=12)
    assert feed.get(11, deal, ["r0"]) == 11
    with pytest.raises(FtarError, match=r"^the stream ended after 12 items, item 12 is needed(\nnext: |$)") as caught:
        feed.get(12, sampler.following(deal, ["r0"], ["r0"]), ["r0"])
    assert "batches=12" in caught.value.hint
    feed.close()


def test_ranks_of_a_replica_share_its_batch() -> None:
    parts = []
    for rank in range(2):
        source = BatchSampler(100, 8, seed=1)
        feed = open_feed(DataLoader(Numbers(100), batch_sampler=source, collate_fn=unchanged), "r0", rank, 2)
        parts.append(feed.get(3, Deal(batches={"r0": 3}, cursor=4), ["r0"]))
    assert [len(part) for part in parts] == [4, 4]
    assert parts[0] + parts[1] == BatchSampler(100, 8, seed=1).indices(3)
    whole = BatchSampler(100, 9, rank=0, ranks=1)
    whole.bind(1, 2)
    assert len(whole.indices(0)) == 9, "tensor parallel ranks need all of it"
    streams: list[Stream[int]] = [Stream(bytes_from), Stream(bytes_from)]
    feeds = [open_feed(stream, "r0", rank, 2) for rank, stream in enumerate(streams)]
    assert [feed.get(3, Deal(batches={"r0": 3}, cursor=4), ["r0"]) for feed in feeds] == [6, 7]


def test_a_loader_that_does_not_follow_the_deal_is_refused() -> None:
    numbers = Numbers(10)
    for loader, problem in (
        (DataLoader(numbers, batch_size=2), "has a batch sampler of its own"),
        (DataLoader(numbers, batch_size=None), "has a batch sampler of its own"),
        ([1, 2], r"session\.data\(\) got a list"),
        (DataLoader(Numbers(9), batch_sampler=BatchSampler(10, 2)), "the data set has 9 samples, the sampler was made"),
    ):
        with pytest.raises(SettingsError, match=problem) as caught:
            open_feed(cast(Any, loader), "r0", 0, 1)
        assert caught.value.hint
    with pytest.raises(FtarError, match="says what to load only inside of a session"):
        next(iter(DataLoader(numbers, batch_sampler=BatchSampler(10, 2))))
    disordered = DataLoader(numbers, batch_sampler=BatchSampler(10, 2), num_workers=1)
    disordered.in_order = False
    with pytest.raises(SettingsError, match="in_order=False"):
        open_feed(disordered, "r0", 0, 1)


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_that_does_not_say_its_length_is_as_long_as_the_sampler_was_told() -> None:
    source = BatchSampler(10, 2, shuffle=False)
    feed = open_feed(DataLoader(Endless(), batch_sampler=source, collate_fn=unchanged), "r0", 0, 1)
    assert feed.get(1, Deal(batches={"r0": 1}, cursor=2), ["r0"]) == [2, 3]
