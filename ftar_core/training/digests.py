"""What a replica says about its results in `Done`, so that a difference is found at the step where it arises.

Two numbers, equal on all replicas or something was corrupted (in transit, in a copy, in the state):

* of all reduced gradients, every byte, at every step. Buckets are read as they become complete, while the training
  thread waits for the rest, and the same pass sees whether they are finite (native `check`);
* of a slice of parameters and optimizer state as they are before the step (rotation.py), read before that wait.

What was read is kept, part by part, until the next step: when two replicas do not agree, the coordinator asks which
bucket or tensor it is.

What happens to a reduced copy between this look and the update becomes part of the parameters, and is found in them
within one rotation. Corruption of a replica's own gradients before the reduction is not visible here at all: it is in
everybody's sum. `own_norm` may give a hint of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence

import torch

from ftar_core.native import core
from ftar_core.training.gradients import GradientTaker
from ftar_core.training.plan import Bucket, BucketPlan
from ftar_core.training.rotation import Rotation
from ftar_core.training.shards import local
from ftar_core.training.update import Update
from ftar_core.wire.ids import EpochId

Part = tuple[str, int]  # name, digest
NAMED = 3  # so many tensors of a bucket are named
EAGER_BYTES = 4 << 20  # smaller gradients are read in one go when all are there


class StepCheck:
    """Of one step at a time. All calls are the training thread's, but `parts`."""

    def __init__(self, plan: BucketPlan, taker: GradientTaker, update: Update, rotation: int) -> None:
        self._plan, self._taker, self._update = plan, taker, update
        self._parameters = list(update.model.named_parameters())
        sizes = [local(parameter).numel() * parameter.element_size() for _, parameter in self._parameters]
        self._rotation = Rotation(sizes, rotation)
        self._step = 0
        self._state: list[Part] = []
        self._epoch: EpochId | None = None
        self._buckets: dict[int, tuple[int, bool]] = {}  # digest, finite; of `_epoch`
        self.eager = plan.nbytes >= EAGER_BYTES

    def begin(self, step: int) -> None:
        """Parameters are those after step - 1 from here to the update."""
        self._step, self._state = step, [(name, _digest(data)) for name, data in self._slice(step)]
        self._epoch, self._buckets = None, {}

    def look(self, epoch: EpochId, buckets: Sequence[int]) -> None:
        """These are reduced in `epoch`. Reads memory without the GIL. Of no use if the epoch ends meanwhile."""
        if epoch != self._epoch:
            self._epoch, self._buckets = epoch, {}
        fresh = [index for index in buckets if index not in self._buckets]
        found = self._taker.memory.check([(index, self._taker.reduced[index]) for index in fresh])
        self._buckets.update(zip(fresh, found, strict=True))

    def read_again(self) -> None:
        """What was read of the buckets is void: one of them is not what it was."""
        self._buckets = {}

    def result(self, epoch: EpochId) -> tuple[int, int, bool]:
        """(digest of the reduced gradients, of the slice of the state, are all finite and is there any weight)"""
        self.look(epoch, range(len(self._plan.all_buckets)))
        ordered = [self._buckets[index] for index in range(len(self._plan.all_buckets))]
        finite = self._taker.total_weight > 0 and all(fine for _, fine in ordered)
        return _together([d for d, _ in ordered]), _together([d for _, d in self._state]), finite

    def parts(self, step: int) -> tuple[Part, ...]:
        """What the numbers of this step are made of; empty if it is over. Any thread."""
        buckets, state = self._buckets, self._state
        if step != self._step:
            return ()
        named = [(_name(self._plan.all_buckets[index]), digest) for index, (digest, _) in sorted(buckets.items())]
        return (*named, *state)

    def _slice(self, step: int) -> Iterator[tuple[str, torch.Tensor | bytes]]:
        for piece in self._rotation.at(step):
            name, parameter = self._parameters[piece.index]
            yield f"parameter {name}", _bytes(parameter, piece.cut)
            for key, value in self._update.state_of(parameter):
                if isinstance(value, torch.Tensor):
                    if value.layout is torch.strided:
                        yield f"optimizer state {key} of {name}", _bytes(value, piece.cut)
                elif isinstance(value, int | float) and piece.first == 0:
                    yield f"optimizer state {key} of {name}", repr(value).encode()


def _bytes(tensor: torch.Tensor, cut: Callable[[int], tuple[int, int]]) -> torch.Tensor:
    flat = local(tensor).reshape(-1).view(torch.uint8)
    first, last = cut(flat.numel())
    return flat[first:last].cpu()


def _digest(data: torch.Tensor | bytes) -> int:
    if isinstance(data, bytes):
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return core.quick_digest(data.data_ptr(), data.numel(), 0)


def _together(digests: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(digests)}Q", *digests)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _name(bucket: Bucket) -> str:
    if not bucket.slots:
        return "reduced sums of weights, tokens and losses"
    names = [slot.name for slot in bucket.slots]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"reduced gradients, bucket {bucket.index} ({', '.join(names[:NAMED])}{more})"
