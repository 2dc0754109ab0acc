"""Data that can only be read in order (token streams): batch number b is a place in the stream."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

from ftar_core.errors import SettingsError
from ftar_core.training.data import Identity, Source, _number

log = logging.getLogger("ftar.session")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Source, Generic[T]):
    """The batches of an iterable data set, ready made: item number b of the stream is batch b of the job.

        def tokens_from(batch):                     # an iterator whose first item is batch number `batch`
            with open("tokens.bin", "rb") as file:
                file.seek(batch * BATCH_BYTES)
                while data := file.read(BATCH_BYTES):
                    yield torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(8, -1)

        for tokens in session.data(ftar_core.Stream(tokens_from, batches=10_000, workers=2)):
            ...
            session.step(loss)

    `source` is one of

    * a function of a number, as above: the replica reads its own batches and nothing else;
    * an object with `seek(number)` and `__next__`, a resumable iterator: likewise;
    * any other iterable, such as a torch IterableDataset or DataLoader: what others train is read and dropped. With R
      replicas that costs R times the reading (and with workers, each of them reads all of it), and for a batch that
      comes back from a lost replica it is read again from its beginning.

    `batches`: the stream has so many items and the job ends when all are trained (0: no end). With several ranks in a
    replica that share a batch, batch b is the items b * ranks + rank. `name` stands for the contents: a state of a
    stream with another name is refused. `workers` processes read ahead, `prefetch` batches each (0: the training
    process reads). Raises SettingsError.
    """

    def __init__(
        self,
        source: Callable[[int], Iterable[T]] | Iterable[T],
        *,
        batches: int = 0,
        name: str = "",
        workers: int = 0,
        prefetch: int = 2,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        for what, value, least in (("batches", batches, 0), ("workers", workers, 0), ("prefetch", prefetch, 1)):
            if not _number(value) or value < least:
                raise SettingsError(f"{what}={value!r}: a number of at least {least} is expected")
        if isinstance(source, io.IOBase):
            raise SettingsError(
                "a file is no stream of batches: its seek() counts bytes",
                hint="give a function of the batch number that opens it, seeks, and yields batches",
            )
        seeks = hasattr(source, "seek") and hasattr(source, "__next__")
        if not callable(source) and not seeks and not hasattr(source, "__iter__"):
            raise SettingsError(
                f"a {type(source).__name__} is no stream",
                hint="give a function of the batch number that returns an iterator, or an iterable",
            )
        super().__init__(batches, rank, ranks)
        self.name, self.workers, self.prefetch = name, workers, prefetch
        self._source = source
        self._ranks_known = rank is not None
        self._loaded_ranks: int | None = None  # of a state that was loaded before the session told ours

    def bind(self, rank: int, ranks: int) -> None:
        super().bind(rank, ranks)
        self._ranks_known = True
        if self._loaded_ranks not in (None, self.ranks):
            self.load_state_dict({**self.state_dict(), "items_per_batch": self._loaded_ranks})

    def load_state_dict(self, state_dict: Mapping[str, object], /) -> None:
        loaded = state_dict.get("items_per_batch")
        if not self._ranks_known and isinstance(loaded, int):
            super().load_state_dict({**state_dict, "items_per_batch": self.ranks})
            self._loaded_ranks = loaded
        else:
            super().load_state_dict(state_dict)

    def identity(self) -> Identity:
        return {"data": "stream", "name": self.name, "items_per_batch": self.ranks}

    def __iter__(self) -> Iterator[int]:
        return self.upcoming()

    def loader(self) -> DataLoader[T]:
        """A loader that reads what is dealt to this replica."""
        reader = Reader(self._source, self.rank, self.ranks)
        if not reader.seeks and not hasattr(self._source, "seek"):
            log.warning("the stream cannot seek: this replica reads the batches of all others, too, and drops them")
        return DataLoader(
            reader,
            sampler=self,
            batch_size=None,
            collate_fn=_same,
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
        )


@dataclass(frozen=True)
class Missing:
    """Instead of an item: why there is none. (An exception in a worker would come out with a traceback.)"""

    text: str
    hint: str


class Reader(Dataset[T_co]):
    """A stream by batch numbers, each worker at its own place in it."""

    def __init__(self, source: Callable[[int], Iterable[T_co]] | Iterable[T_co], rank: int, ranks: int) -> None:
        self.seeks = callable(source)
        self._source, self._rank, self._ranks = source, rank, ranks
        self._items: Iterator[T_co] | None = None
        self._at = 0  # the number of the next item

    def __getitem__(self, number: int) -> T_co | Missing:  # type: ignore[override]
        item = number * self._ranks + self._rank
        if self._items is None or self._at != item:
            missing = self._go_to(item)
            if missing is not None:
                return missing
        assert self._items is not None  # noqa: S101  # made by _go_to
        try:
            while True:
                found = next(self._items)
                self._at += 1
                if self._at > item:
                    return found
        except StopIteration:
            self._items, end = None, self._at
            return Missing(
                f"the stream ended after {end} items, item {item} is needed",
                f"say how many batches it has: batches={end // self._ranks}, or make it endless",
            )

    def _go_to(self, item: int) -> Missing | None:
        source = self._source
        if callable(source):
            self._items, self._at = iter(source(item)), item
        elif hasattr(source, "seek"):
            source.seek(item)
            self._items, self._at = iter(source), item
        elif self._items is None or item < self._at:
            if iter(source) is source and self._at:  # an iterator, which is read once
                return Missing(
                    f"the stream is at item {self._at} and cannot go back to item {item}, which a lost replica left",
                    "give a function of the batch number that returns an iterator, or an iterable that can begin anew",
                )
            self._items, self._at = iter(source), 0
        return None


def _same(item: T) -> T:
    return item
