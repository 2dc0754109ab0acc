"""Between the deal and a loader that reads ahead: which batches to load next, and which of those loaded to use.

The deal of a step is known when the step before is committed, and a loader with workers must know earlier. So it is
told what will be dealt if nobody is lost and nobody joins (`Foresight`), which is right for nearly all steps. What it
has loaded is matched with what was really dealt: a batch that was loaded and then dealt to somebody else is dropped,
one that will still be this replica's a little later is put aside, one that was not foreseen is loaded at once. So a
batch is trained if, and only if, it was dealt, however far ahead it was read.

What it costs: a batch that nobody could foresee (of a lost replica, or the first one of a replica that joins) is loaded
while its step is running already, so the others wait for one loading time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from torch.utils.data import DataLoader

from ftar_core.errors import FtarError, SettingsError
from ftar_core.protocol import sampler
from ftar_core.training.data import BatchSampler, Source
from ftar_core.training.stream import Missing, Stream
from ftar_core.wire.messages import Deal

T = TypeVar("T")


class Foresight:
    """What a replica will be dealt if the contributors stay who they are."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._contributors: tuple[str, ...] = ()
        self._deals: deque[Deal] = deque([sampler.NOTHING_DEALT])  # of this step and of further ones

    def at(self, deal: Deal, contributors: Sequence[str]) -> None:
        """`deal` is that of the present step; `contributors` by slot."""
        as_foreseen = len(self._deals) > 1 and self._deals[1] == deal
        if tuple(contributors) == self._contributors and as_foreseen:
            self._deals.popleft()
        elif tuple(contributors) != self._contributors or self._deals[0] != deal:
            self._contributors, self._deals = tuple(contributors), deque([deal])

    def numbers(self) -> Iterator[int]:
        """The batches of this replica in the order of their steps, from the present one on."""
        place = 0
        while True:
            if place == len(self._deals):
                last = self._deals[-1]
                if self._replica not in self._contributors or sampler.exhausted(last, self._contributors):
                    return
                self._deals.append(sampler.following(last, self._contributors, self._contributors))
            number = self._deals[place].batches.get(self._replica)
            if number is not None:
                yield number
            place += 1


class Feed(Generic[T]):
    """Pairs what a DataLoader returns with batch numbers. One thread."""

    def __init__(self, loader: DataLoader[T], source: Source, replica: str) -> None:
        self.dropped = 0  # batches that were loaded and then dealt to somebody else, or to nobody yet
        self._loader, self.source = loader, source
        self._foresight = Foresight(replica)
        self._items: Iterator[T] | None = None
        self._wanted: int | None = None  # now
        self._filler = 0  # what to load while nothing is dealt
        self._ahead: deque[int] = deque()  # told to the loader and not returned by it yet, in that order
        self._aside: dict[int, T] = {}
        source.feed_from(self._numbers)

    def get(self, number: int, deal: Deal, contributors: Sequence[str]) -> T:
        """The data of the batch that this replica trains now; `deal` is that of the step. Blocks until it is loaded.
        Raises FtarError if there is none."""
        self._foresight.at(deal, contributors)
        self._wanted = number
        try:
            while number not in self._aside:
                came, item = self._next()
                if came == number:
                    break
                self._put_aside(came, item)
            else:
                item = self._aside.pop(number)
        finally:
            self._wanted = None
        if isinstance(item, Missing):
            raise FtarError(item.text, hint=item.hint)
        return item

    def any(self) -> T:
        """Some batch, for a turn whose gradients are dropped; the loader warms up, too."""
        begin = self.source.begin()
        last = self.source.total - 1
        self._filler = min(begin.cursor, last) if last >= 0 else begin.cursor
        _, item = self._next()
        if isinstance(item, Missing):
            raise FtarError(item.text, hint=item.hint)
        return item

    def close(self) -> None:
        self.source.feed_from(None)
        self._items = None  # ends the workers
        self._aside.clear()

    def _numbers(self) -> Iterator[int]:
        """What the loader is to load: asked for one at a time, in the training thread."""
        while True:
            number = self._number()
            if number is None:
                return
            self._ahead.append(number)
            yield number

    def _number(self) -> int | None:
        known = {*self._ahead, *self._aside}
        if self._wanted is not None and self._wanted not in known:
            return self._wanted
        if self._wanted is None:
            return self._filler
        return next((number for number in self._foresight.numbers() if number not in known), None)

    def _next(self) -> tuple[int, T]:
        """The next batch that the loader returns, and its number."""
        for _ in range(2):
            if self._items is None:
                self._ahead.clear()
                self._items = iter(self._loader)
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None  # it had reached the end of the data, and a batch has come back since
                continue
            return self._ahead.popleft(), item
        raise FtarError(
            "the loader returns nothing",
            hint="iterate over a torch.utils.data.DataLoader with this sampler, and with nothing in between",
        )

    def _put_aside(self, number: int, item: T) -> None:
        """Loaded, but not for this step. Kept if it is foreseen for one of the next, dropped otherwise."""
        reach = len(self._ahead) + len(self._aside) + 2
        soon = set(islice(self._foresight.numbers(), reach))
        for other in [other for other in self._aside if other not in soon]:
            del self._aside[other]
            self.dropped += 1
        if number in soon:
            self._aside[number] = item
        else:
            self.dropped += 1


def open_feed(data: DataLoader[T] | Stream[T], replica: str, rank: int, ranks: int) -> Feed[T]:
    """Checks that the loader loads what a Source says. Raises SettingsError."""
    if isinstance(data, Stream):
        data.bind(rank, ranks)
        return Feed(data.loader(), data, replica)
    if not isinstance(data, DataLoader):
        raise SettingsError(
            f"session.data() got a {type(data).__name__}",
            hint="give a DataLoader(dataset, batch_sampler=ftar_core.BatchSampler(...)), or a ftar_core.Stream",
        )
    source = data.batch_sampler
    if not isinstance(source, BatchSampler):
        raise SettingsError(
            "the loader has a batch sampler of its own, which does not know what is dealt to this replica",
            hint="make it with DataLoader(dataset, batch_sampler=ftar_core.BatchSampler(...)); for a data set that can "
            "only be iterated over use ftar_core.Stream",
        )
    if not getattr(data, "in_order", True):
        raise SettingsError("the loader has in_order=False: which batch is which cannot be told", hint="leave it out")
    try:
        size = len(data.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        size = source.samples  # it does not say; the sampler was told
    if size != source.samples:
        raise SettingsError(
            f"the data set has {size} samples, the sampler was made for {source.samples}",
            hint="make both from the same data set: BatchSampler(dataset, ...)",
        )
    source.bind(rank, ranks)
    return Feed(data, source, replica)
