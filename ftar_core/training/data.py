"""What a batch number stands for, and which numbers are trained: the memory of the data, a few numbers in all.

The coordinator deals batch numbers (protocol/sampler.py), every one exactly once in the committed history, whoever is
lost. A `Source` says what a number is: samples of a map-style data set (`BatchSampler`), or a place in a stream
(`Stream`, stream.py). Both are pure functions of the number, so a batch that comes back from a lost replica is the same
batch wherever it is dealt next, and any number of replicas can go on.

What has been trained is all numbers below `next` without those in `waiting`. The session moves both on with each
commit, and they travel with the model: to a replica that catches up, and in the user's checkpoint (`state_dict`), from
which a later job goes on with any number of replicas. (A step that nobody applies, because its gradients were not
finite, counts as trained: its batches would only do that again.)
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sized

from ftar_core.errors import FtarError, SettingsError, StateMismatch
from ftar_core.training.journal import Json
from ftar_core.training.sampling import dataset_length, permuted
from ftar_core.wire.messages import Deal

Identity = dict[str, bool | int | str | None]


class Source(abc.ABC):
    """Base of BatchSampler and Stream. `total`: how many batches there are (0: no end). `rank` of `ranks` that share a
    batch; None: as the session's settings say (RANK and WORLD_SIZE, inside the replica). Ranks that need the whole
    batch (tensor parallel ones) say rank=0, ranks=1."""

    def __init__(self, total: int, rank: int | None, ranks: int | None) -> None:
        if (rank is None) != (ranks is None):
            raise SettingsError("rank and ranks belong together", hint="give both, or neither")
        if rank is not None and ranks is not None and not 0 <= rank < ranks:
            raise SettingsError(f"rank={rank} of ranks={ranks}: a rank counts from 0", hint="give both, or neither")
        self.total = total
        self.rank, self.ranks = (rank or 0), (ranks or 1)
        self._fixed = rank is not None
        self._next = 0  # no batch from here on is trained yet
        self._waiting: tuple[int, ...] = ()  # nor are these below it, ascending
        self._numbers: Callable[[], Iterator[int]] | None = None

    @abc.abstractmethod
    def identity(self) -> Identity:
        """What must be the same for a batch number to stand for the same data."""

    def weight(self, number: int) -> float:
        """Of this batch in the average over the replicas, 1 for a whole one."""
        return 1.0

    # --- how far training has come

    def begin(self) -> Deal:
        """From where a job that begins with this state deals."""
        return Deal(batches={}, cursor=self._next, returned=self._waiting, limit=self.total)

    def stands_at(self, deal: Deal) -> None:
        """All before the step of `deal` is committed, nothing of it yet."""
        upcoming = sorted((*deal.returned, *deal.batches.values()))
        following = deal.cursor
        while upcoming and upcoming[-1] == following - 1:
            following = upcoming.pop()
        self._next, self._waiting = following, tuple(upcoming)

    @property
    def trained(self) -> int:
        """How many batches are trained."""
        return self._next - len(self._waiting)

    def state_dict(self) -> dict[str, object]:
        """What the data is, and which batches are trained: a few numbers, for a checkpoint. After `session.step()`
        it fits the model."""
        return {**self.identity(), "next": self._next, "waiting": list(self._waiting)}

    def load_state_dict(self, state_dict: Mapping[str, object], /) -> None:
        """Go on where that state stood; in a new job before its first turn. Raises StateMismatch, and changes nothing,
        if it is of other data."""
        mine = self.identity()
        known = {*mine, "next", "waiting"}
        if state_dict.get("data") != mine["data"]:
            raise StateMismatch(
                f"the state of the data is of {state_dict.get('data')!r}, this is {mine['data']!r}", hint=_OTHER_DATA
            )
        for wrong, text in ((set(state_dict) - known, "unknown"), (known - set(state_dict), "missing")):
            if wrong:
                raise StateMismatch(
                    f"the state of the data: {text} {', '.join(sorted(map(str, wrong)))}",
                    hint=f"load what state_dict() of a {type(self).__name__} of this version returned",
                )
        for key, value in mine.items():
            if state_dict[key] != value or isinstance(state_dict[key], bool) != isinstance(value, bool):
                raise StateMismatch(
                    f"the data here has {key}={value!r}, its state {key}={state_dict[key]!r}", hint=_OTHER_DATA
                )
        self._next, self._waiting = _progress(state_dict["next"], state_dict["waiting"])

    # --- for the session

    def fingerprint(self) -> str:
        """Equal for replicas that may begin a job together."""
        begin = {"next": self._next, "waiting": self._waiting, "total": self.total}
        return hashlib.sha256(json.dumps([self.identity(), begin], sort_keys=True).encode()).hexdigest()

    def bind(self, rank: int, ranks: int) -> None:
        """This process's part in its replica. Raises SettingsError where a batch cannot be shared out so."""
        if not self._fixed:
            self.rank, self.ranks = rank, ranks

    def describe(self) -> dict[str, Json]:
        """For the journal: what the batch numbers of its steps stand for."""
        return {**self.identity(), "total": self.total, "next": self._next, "waiting": list(self._waiting)}

    def check_begin(self) -> None:
        """Raises FtarError if there is nothing to train."""
        if self.total and self._next >= self.total and not self._waiting:
            raise FtarError(
                f"all {self.total} batches of the data are trained already, says its state",
                hint="give more passes or batches, or leave its state_dict() out of what you load",
            )

    def feed_from(self, numbers: Callable[[], Iterator[int]] | None) -> None:
        """Where a loader gets the numbers from while a session runs."""
        self._numbers = numbers

    def upcoming(self) -> Iterator[int]:
        if self._numbers is None:
            raise FtarError(
                f"a {type(self).__name__} says what to load only inside of a session",
                hint="iterate over session.data(loader), not over the loader itself",
            )
        return self._numbers()


_OTHER_DATA = "give the same data and options as when the state was made, or leave its state out: it then begins anew"


def _progress(following: object, waiting: object) -> tuple[int, tuple[int, ...]]:
    if not _number(following):
        raise StateMismatch(f"the state of the data: next={following!r}: a number of at least 0 is expected")
    assert isinstance(following, int)  # noqa: S101  # for the type checker
    listed = tuple(waiting) if isinstance(waiting, list | tuple) else (None,)
    if not all(_number(number) and number < following for number in listed) or len(set(listed)) != len(listed):
        raise StateMismatch(
            f"the state of the data: waiting={waiting!r:.200}: different numbers below next={following} are expected"
        )
    return following, tuple(sorted(number for number in listed if isinstance(number, int)))


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


class BatchSampler(Source):
    """The batches of a map-style data set, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

        sampler = ftar_core.BatchSampler(dataset, batch_size=8, seed=1, passes=3)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for inputs, targets in session.data(loader):
            ...
            session.step(loss)

    `dataset`, or its length in samples. `batch_size` is of one replica; several ranks in it share the batch. Each pass
    over the data has an order of its own (`shuffle`), of `seed` and the number of the pass. The last samples of a pass:

        drop_last=None    share a batch with the first of the next pass: every sample once a pass, all batches whole
        drop_last=False   are a shorter batch, which weighs less in the average over the replicas
        drop_last=True    are left out of this pass

    `passes`: the job ends when all batches of so many passes are trained (0: no end). `len` is the number of batches of
    one pass, which all replicas train together.

    Raises SettingsError. All replicas need the same data and options; one that has others is refused by name.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool | None = None,
        passes: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.samples = _samples(dataset)
        if not _number(batch_size) or batch_size < 1:
            raise SettingsError(f"batch_size={batch_size!r}: a number of at least 1 is expected")
        if not _number(passes):
            raise SettingsError(f"passes={passes!r}: a number of at least 0 is expected (0: no end)")
        if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
            raise SettingsError(f"seed={seed!r}: a number of 64 bits is expected")
        if drop_last and batch_size > self.samples:
            raise SettingsError(
                f"batch_size={batch_size} of {self.samples} samples: drop_last leaves no batch",
                hint="use a smaller batch, or drop_last=None",
            )
        self.batch_size, self.seed, self.shuffle = batch_size, seed, bool(shuffle)
        self.drop_last, self.passes = drop_last, passes
        rest = self.samples % batch_size
        self._per_pass = self.samples // batch_size + (1 if rest and not drop_last else 0)
        whole = -(-self.samples * passes // batch_size)  # rounded up
        super().__init__(whole if drop_last is None else self._per_pass * passes, rank, ranks)
        self.bind(self.rank, self.ranks)

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.indices, self.upcoming())

    def identity(self) -> Identity:
        return {
            "data": "samples",
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def bind(self, rank: int, ranks: int) -> None:
        super().bind(rank, ranks)
        if self.batch_size % self.ranks:
            raise SettingsError(
                f"batch_size={self.batch_size} cannot be shared by {self.ranks} ranks",
                hint="batch_size is of the whole replica: use a multiple of its ranks",
            )
        short = {False: self.samples, None: self.samples * self.passes, True: 0}[self.drop_last] % self.batch_size
        if short % self.ranks:
            raise SettingsError(
                f"the last batch has {short} samples, which {self.ranks} ranks cannot share",
                hint="use drop_last=True" if self.drop_last is False else "use drop_last=True, or passes=0",
            )

    def whole(self, number: int) -> list[int]:
        """Sample indices (each 0..samples-1) of batch `number` of the job. Of all ranks of the replica."""
        size, count = self.batch_size, self.samples
        if self.drop_last is None:
            first = number * size
            end = first + size if not self.passes else min(first + size, count * self.passes)
            places = [divmod(position, count) for position in range(first, end)]
        else:
            turn, batch = divmod(number, self._per_pass)
            places = [(turn, position) for position in range(batch * size, min((batch + 1) * size, count))]
        if not self.shuffle:
            return [position for _, position in places]
        return [permuted(position, count, self.seed, turn) for turn, position in places]

    def indices(self, number: int) -> list[int]:
        """This rank's part of batch `number`."""
        found = self.whole(number)
        share = len(found) // self.ranks
        return found[self.rank * share : (self.rank + 1) * share]

    def weight(self, number: int) -> float:
        """The share of a whole batch that this one has: an average over samples stays one."""
        last_of_pass = self.drop_last is False and (number + 1) % self._per_pass == 0
        if last_of_pass or (self.drop_last is None and self.total and number == self.total - 1):
            return len(self.whole(number)) / self.batch_size
        return 1.0


def _samples(dataset: Sized | int) -> int:
    if not isinstance(dataset, int | Sized) or isinstance(dataset, bool):
        raise SettingsError(
            f"a {type(dataset).__name__} has no length, so its samples cannot be dealt",
            hint="give the number of samples, or use ftar_core.Stream for a data set that can only be iterated over",
        )
    try:
        return dataset_length(dataset)
    except (TypeError, NotImplementedError) as error:
        raise SettingsError(
            f"the length of the {type(dataset).__name__} is not known: {error}",
            hint="give the number of samples, or use ftar_core.Stream",
        ) from None
    except ValueError as error:
        raise SettingsError(str(error), hint="give at least one sample") from None
