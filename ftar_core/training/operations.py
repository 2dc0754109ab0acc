"""Plain operations between replicas, in the middle of a step: all-reduce, broadcast, barrier of the user's own tensors.

A gradient's result is used behind the commit only, so nobody acts on one that others do not have. The result of a plain
operation is used at once, and a replica may die while some have it and some do not. What then must not happen is that
two survivors go on with two results. So whoever has returned from an operation keeps the result until the step is
committed, and answers for it:

* Every operation begins with a *header*, a tiny all-reduce in which each member says what it is about to do and whether
  it has the result already. (A difference between replicas is an error that names who differs, not a hang.)
* Nobody has it: it is done, with the inputs of all members of the epoch.
* Somebody has it: the first who has sends his, bit for bit; the others add zeros. That is so after an epoch change,
  where the members of the new epoch answer, in the background, for each operation of the step that they have returned
  from; and for a replica that enters a step in which the others have operated already.

A result counts only if the epoch in which it arrived is still the current one when it is returned, under the same lock
under which an epoch is entered. With it: of the living members of any epoch, all that have returned from an operation
have the same bits.

Order on the ring: a link brings messages in order, and one that has no place yet holds up all behind it. A member that
is behind waits for each operation before it submits what comes later in its program; so those that are ahead, when they
answer, go through the step in the order of the program as well: the buckets that were produced before an operation, the
operation to its end, the next buckets. A session without plain operations pays for none of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import torch

from ftar_core.errors import FtarError
from ftar_core.training.plan import DTYPE_CODES

if TYPE_CHECKING:
    from ftar_core.native._core import Event
    from ftar_core.wire.messages import Deal, EpochInfo

OPERATION_BUCKETS = 1 << 24  # bucket numbers from here on: 2 n the header, 2 n + 1 the data of operation n of a step
CARRY_MS = 500
LOOK_S = 0.2


class Kind(IntEnum):
    SUM = 1
    MEAN = 2
    BROADCAST = 3
    BARRIER = 4


class OperationRing(Protocol):
    """The part of ftar_core.native.core.Engine that is used here."""

    def submit(  # noqa: PLR0917 (the native call has no keywords)
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int
    ) -> None: ...
    def reduce(  # noqa: PLR0917
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int, timeout_ms: int
    ) -> Event | None: ...


@dataclass
class Operation:
    """`given`: flat, contiguous, in host memory, nobody else's. `source`: whose tensor a broadcast sends; empty: the
    first contributor's that has a batch."""

    kind: Kind
    given: torch.Tensor
    source: str = ""
    number: int = 0
    before: frozenset[int] = frozenset()  # gradient buckets that this turn had produced when it began
    result: torch.Tensor | None = None

    def describe(self) -> str:
        name = {Kind.SUM: "allreduce (sum)", Kind.MEAN: "allreduce (mean)", Kind.BROADCAST: "broadcast"}.get(self.kind)
        if name is None:
            return "barrier"
        return f"{name} of {self.given.numel()} {str(self.given.dtype).removeprefix('torch.')}"

    @property
    def signature(self) -> int:
        """Equal where two members are about to do the same; 63 bits."""
        text = f"{int(self.kind)} {self.given.dtype} {self.source} {self.number}"
        return (crc32(text.encode()) << 31) ^ (self.given.numel() & 0x7FFFFFFF)


class Operations:
    """The operations of the running step. `changed` is the exchange's lock; methods marked (locked) are called under
    it. `ended`: the member has ended. `produced`: the gradient buckets of this turn so far (locked)."""

    def __init__(
        self,
        *,
        replica: str,
        ring: OperationRing,
        changed: threading.Condition,
        ended: Callable[[], bool],
        produced: Callable[[], frozenset[int]] = frozenset,
    ):
        self._replica, self._ring, self._changed, self._ended = replica, ring, changed, ended
        self._produced = produced
        self._one = threading.Lock()
        self._key = b""
        self._epoch: EpochInfo | None = None
        self._deal: Deal | None = None
        self._step = 0
        self._made: list[Operation] = []  # returned from in this step
        self._answered = 0  # how many of them were answered for in this epoch
        self._header: torch.Tensor | None = None  # of the one that is being answered for
        self._flying: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrived: set[tuple[int, int]] = set()
        self._void = True
        self.begun = 0

    # --- control loop (locked)

    @property
    def settled(self) -> bool:
        """All operations that were returned from are answered for in this epoch. (locked)"""
        return self._answered >= len(self._made)

    @property
    def before(self) -> frozenset[int]:
        """While one is answered for: the gradient buckets that come before it in the program. (locked)"""
        return frozenset() if self.settled else self._made[self._answered].before

    @property
    def made(self) -> int:
        return len(self._made)

    def entered(self, key: bytes, epoch: EpochInfo, step: int, deal: Deal) -> None:
        """After the ring was told: no operation of another epoch touches its buffers any more. (locked)"""
        self._flying.clear()
        self._arrived.clear()
        self._key, self._epoch, self._step, self._deal = key, epoch, step, deal
        self._answered = 0
        self._answer()

    def new_step(self, step: int, deal: Deal | None) -> None:
        """The last step is true, for everybody: nobody asks any more. (locked)"""
        self._step, self._deal = step, deal
        self._made.clear()
        self._arrived.clear()
        self._answered = self.begun = 0

    def void(self) -> None:
        """This turn's results are of no use: out of step with the others. (locked)"""
        self._void = True

    def left(self) -> None:
        """In no epoch any more. (locked)"""
        self._void = True
        self._key, self._epoch = b"", None
        self._flying.clear()
        self._made.clear()
        self._answered = self.begun = 0

    def reduced(self, step: int, bucket: int) -> None:
        """The ring: this bucket of the current epoch is complete. (locked)"""
        buffers = self._flying.pop((step, bucket), None)
        if buffers is None:
            self._arrived.add((step, bucket))
            return
        if step != self._step or self.settled or bucket >> 1 != _header(self._answered) >> 1:
            return
        operation = self._made[self._answered]
        if bucket == _header(self._answered):
            have = buffers[1].tolist()[1::2]
            if operation.kind is not Kind.BARRIER and operation.given.numel() and not all(have):
                assert operation.result is not None  # noqa: S101  # it was returned from
                mine = have.index(1) == self._me()
                bits = _bits(operation.result) if mine else torch.zeros_like(_bits(operation.result))
                return self._submit(_header(operation.number) + 1, bits)
        self._answered += 1
        self._answer()

    def _answer(self) -> None:
        if not self.settled:
            operation = self._made[self._answered]
            self._submit(_header(operation.number), self._say(operation))

    def _submit(self, bucket: int, src: torch.Tensor) -> None:
        dst = torch.empty_like(src)
        self._flying[self._step, bucket] = (src, dst)
        code = DTYPE_CODES[src.dtype]
        self._ring.submit(self._key, self._step, bucket, src.data_ptr(), dst.data_ptr(), src.numel(), code)

    def _me(self) -> int:
        assert self._epoch is not None  # noqa: S101
        return self._epoch.names().index(self._replica)

    def _say(self, operation: Operation) -> torch.Tensor:
        """int64 [2 members]: what each is about to do, and whether it has the result."""
        assert self._epoch is not None  # noqa: S101
        said = torch.zeros(2 * len(self._epoch.members), dtype=torch.int64)
        me = self._me()
        said[2 * me], said[2 * me + 1] = operation.signature, operation.result is not None
        return said

    # --- training thread

    def begin(self, step: int) -> None:
        """A turn of this step begins, in which this replica contributes."""
        with self._changed:
            self._void = not self._key or step != self._step

    def run(self, operation: Operation) -> torch.Tensor | None:
        """The result (flat; not to be changed); None if this turn is of no use any more, or the member has ended.
        Raises FtarError if the replicas are about to do different things."""
        with self._one:
            with self._changed:
                operation.number = len(self._made)
                operation.before = self._produced()
                self.begun += 1
            tried = b""
            while True:
                with self._changed:
                    while not (self._void or self._ended() or (self._key not in (b"", tried) and self.settled)):
                        self._changed.wait(LOOK_S)
                    if self._void or self._ended():
                        return None
                    tried, epoch, deal = self._key, self._epoch, self._deal
                assert epoch is not None and deal is not None  # noqa: S101, PT018
                result = self._attempt(operation, tried, epoch, deal)
                if result is None:
                    continue
                with self._changed:
                    if self._key == tried and not self._void:
                        operation.result = result
                        self._made.append(operation)
                        self._answered = len(self._made)
                        return result

    def _attempt(self, operation: Operation, key: bytes, epoch: EpochInfo, deal: Deal) -> torch.Tensor | None:
        """The result in this epoch; None if it has ended meanwhile."""
        with self._changed:
            if self._key != key:
                return None
            said = self._say(operation)
        heard = self._reduce(key, _header(operation.number), said)
        if heard is None:
            return None
        table, names = heard.tolist(), epoch.names()
        others = [name for name, signature in zip(names, table[::2], strict=True) if signature != operation.signature]
        if others:
            raise FtarError(
                f"step {self._step}: {self._replica} is about to do {operation.describe()}, as plain operation "
                f"{operation.number + 1} of the step, but {', '.join(others)} something else",
                hint="all replicas must call the same operations, with the same shapes and dtypes, in the same order",
            )
        if operation.kind is Kind.BARRIER or not operation.given.numel():
            return operation.given
        if any(table[1::2]):
            bits = self._reduce(key, _header(operation.number) + 1, torch.zeros_like(_bits(operation.given)))
            return None if bits is None else _from_bits(bits, operation.given)
        with_batch = [name for name in names if name in deal.batches]
        if operation.kind is Kind.BROADCAST:
            source = operation.source or (with_batch or names)[0]
            if source not in names:
                raise FtarError(f"broadcast from {source}, which does not contribute: {', '.join(names)} do")
            mine = _bits(operation.given)
            if source != self._replica:
                mine = torch.zeros_like(mine)
            bits = self._reduce(key, _header(operation.number) + 1, mine)
            return None if bits is None else _from_bits(bits, operation.given)
        given = operation.given if self._replica in with_batch else torch.zeros_like(operation.given)
        total = self._reduce(key, _header(operation.number) + 1, given)
        if total is not None and operation.kind is Kind.MEAN and len(with_batch) > 1:
            total.div_(len(with_batch))
        return total

    def _reduce(self, key: bytes, bucket: int, src: torch.Tensor) -> torch.Tensor | None:
        dst = torch.empty_like(src)
        step, code = self._step, DTYPE_CODES[src.dtype]
        event = self._ring.reduce(key, step, bucket, src.data_ptr(), dst.data_ptr(), src.numel(), code, CARRY_MS)
        while event is None:  # it goes on; that it is complete is told to `reduced`
            with self._changed:
                if (step, bucket) in self._arrived:
                    self._arrived.discard((step, bucket))
                    return dst
                if self._key != key or self._void or self._ended():
                    return None
                self._changed.wait(LOOK_S)
        return dst if event["type"] == "reduced" else None


def _header(number: int) -> int:
    return OPERATION_BUCKETS + 2 * number


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as int32, so that adding zeros keeps every bit (that of -0.0, and NaNs)."""
    raw = tensor.reshape(-1).view(torch.uint8)
    whole = torch.zeros(-(-raw.numel() // 4) * 4, dtype=torch.uint8)
    whole[: raw.numel()] = raw
    return whole.view(torch.int32)


def _from_bits(bits: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    raw = bits.view(torch.uint8)[: like.numel() * like.element_size()]
    return raw.clone().view(like.dtype)
