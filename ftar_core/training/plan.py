"""The canonical bucket plan: which gradient lies where, the same on every replica.

A ring all-reduce can only add what both sides laid out alike, so the layout is a function of the model alone:
trainable parameters in reverse order of `named_parameters()` (the order in which backward roughly produces them),
grouped by dtype into flat buckets. It never changes during a job and does not depend on which gradients a backward
happens to produce; a parameter without a gradient counts as zeros. Its hash travels in `Hello` and the coordinator
refuses a replica with another one, before a single gradient could be added to the wrong place.

Where a replica shards its model over several ranks, each rank has a plan of its own, over its local parts, and a ring
of its own with the same rank of the other replicas. Parameters that all ranks of a replica hold whole (those
that tensor parallelism leaves alone) lie in buckets of their own, laid out alike on all ranks: the order of additions
depends on the place in a bucket, so each rank's copy gets the same bits.

Buckets of about 4 MiB: large enough that the fixed cost of a ring pass (2 (n - 1) messages) is small against the bytes,
small enough that the first bucket is under way long before backward ends. Of a model below 16 MiB a quarter of it, for
the same reason: what is in the last bucket moves when backward is over, and everybody waits for it.

One more tiny bucket, the *tally*, is reduced with every step: float64 [weight, tokens, weight x loss, ...]. The weight
is summed in the same reduction as the gradients, with all of float64's precision even when gradients are bfloat16 (a
weight of 4,097 tokens would be rounded there), and the mean loss over the contributors comes for free.

Refused, with the name of what is in the way: parameters of a dtype that the ring cannot add, and modules that change
buffers in forward (BatchNorm's running statistics): they would drift apart between replicas, and catch-up could not
replay them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ftar_core.errors import PlanMismatch
from ftar_core.training.shards import is_split, local, placement
from ftar_core.wire.outline import Parameter, pack

MOST_BUCKET_BYTES = 4 * 1024 * 1024
LEAST_BUCKET_BYTES = 256 * 1024
PARTS = 4  # of a small model's gradients
TALLY_FIELDS = 4  # weight, tokens, weight * loss, weight of those that told a loss
PLAN_VERSION = 2

# torch dtype -> its code in the native core (ftar_core.native.core.DTYPES) and its size in bytes
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
_GRADIENT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies: elements [offset, offset + count) of its bucket. `shape` is that of this rank's part;
    of a sharded parameter, `whole` is the global shape and `placement` how it is spread."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    offset: int  # elements
    count: int  # elements
    whole: tuple[int, ...] = ()
    placement: str = ""


@dataclass(frozen=True)
class Bucket:
    index: int
    dtype: torch.dtype
    count: int  # elements
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """Immutable. `buckets` hold the gradients; `tally` is the last bucket of every step."""

    buckets: tuple[Bucket, ...]
    tally: Bucket

    @cached_property
    def all_buckets(self) -> tuple[Bucket, ...]:
        return (*self.buckets, self.tally)

    @cached_property
    def slots(self) -> dict[str, Slot]:
        return {slot.name: slot for bucket in self.buckets for slot in bucket.slots}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one set of buckets: what is retained for a retry, and again for the results."""
        return sum(bucket.nbytes for bucket in self.all_buckets)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over names, dtypes, shapes (of this rank's parts and global ones) and places."""
        layout = [
            [
                str(bucket.dtype),
                [[s.name, list(s.shape), s.offset, list(s.whole), s.placement] for s in bucket.slots],
            ]
            for bucket in self.buckets
        ]
        text = json.dumps([PLAN_VERSION, TALLY_FIELDS, layout], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def outline(self) -> bytes:
        """The parameters, for a comparison with another replica's (wire/outline.py)."""
        return pack(
            [
                Parameter(
                    name=slot.name,
                    dtype=str(bucket.dtype).removeprefix("torch."),
                    shape=slot.whole or slot.shape,
                    part=slot.shape,
                    placement=slot.placement,
                    bucket=bucket.index,
                )
                for bucket in self.buckets
                for slot in bucket.slots
            ]
        )

    def describe(self) -> str:
        """One line for logs: "plan 1f3a..: 14 parameters, 1234567 elements, 2 buckets, first wte.weight (256, 128)"."""
        elements = sum(bucket.count for bucket in self.buckets)
        first = next(iter(self.slots.values()), None)
        named = f", first {first.name} {first.shape}" if first is not None else ""
        counts = f"{len(self.slots)} parameters, {elements} elements, {len(self.buckets)} buckets"
        return f"plan {self.hash[:12]}: {counts}{named}"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, in canonical order (reversed `named_parameters`; tied ones once)."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return dict(reversed(named))


def make_plan(model: nn.Module, bucket_bytes: int = 0, reduce_dtype: torch.dtype | None = None) -> BucketPlan:
    """The plan of this model. `bucket_bytes` 0: as the model is large. `reduce_dtype`: gradients are reduced in this
    type, whatever their own. Raises PlanMismatch, naming the parameter or module, for what cannot be trained this
    way."""
    refuse_forward_buffers(model)
    parameters = trainable(model)
    if reduce_dtype is not None and reduce_dtype not in _GRADIENT_DTYPES:
        raise PlanMismatch(
            f"reduce_dtype={reduce_dtype}: gradients cannot be all-reduced in it",
            hint="use torch.float32, float64, bfloat16 or float16, or None for that of each parameter",
        )
    if not parameters:
        raise PlanMismatch(
            "the model has no trainable parameters",
            hint="build the model and set requires_grad before the Session is made",
        )
    bucket_bytes = bucket_bytes or usual_bucket_bytes(parameters.values(), reduce_dtype)
    open_slots: dict[tuple[torch.dtype, bool], list[_Piece]] = {}
    closed: list[tuple[torch.dtype, list[_Piece]]] = []
    for name, parameter in parameters.items():
        if parameter.dtype not in _GRADIENT_DTYPES:
            raise PlanMismatch(
                f"parameter {name}: gradients of {parameter.dtype} cannot be all-reduced",
                hint="use float32, float64, bfloat16 or float16, or set requires_grad_(False)",
            )
        dtype = reduce_dtype or parameter.dtype
        group = (dtype, is_split(parameter))
        waiting = open_slots.setdefault(group, [])
        part = local(parameter)
        size = part.numel() * dtype.itemsize
        used = sum(piece.count for piece in waiting) * dtype.itemsize
        if waiting and used + size > bucket_bytes:
            closed.append((dtype, waiting))
            waiting = open_slots[group] = []
        waiting.append(_Piece(name, tuple(part.shape), part.numel(), tuple(parameter.shape), placement(parameter)))
    closed += [(dtype, waiting) for (dtype, _), waiting in open_slots.items() if waiting]
    buckets = tuple(_lay_out(index, dtype, contents) for index, (dtype, contents) in enumerate(closed))
    return BucketPlan(buckets, Bucket(len(buckets), torch.float64, TALLY_FIELDS, ()))


def usual_bucket_bytes(parameters: Iterable[nn.Parameter], reduce_dtype: torch.dtype | None = None) -> int:
    """The same on all ranks of a replica, whose parts may differ in size: of the whole parameters."""
    nbytes = sum(p.numel() * (reduce_dtype or p.dtype).itemsize for p in parameters)
    return min(MOST_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, nbytes // PARTS))


@dataclass(frozen=True)
class _Piece:
    name: str
    shape: tuple[int, ...]
    count: int
    whole: tuple[int, ...]
    placement: str


def _lay_out(index: int, dtype: torch.dtype, contents: list[_Piece]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for piece in contents:
        slots.append(Slot(piece.name, piece.shape, index, offset, piece.count, piece.whole, piece.placement))
        offset += piece.count
    return Bucket(index, dtype, offset, tuple(slots))


def refuse_forward_buffers(model: nn.Module) -> None:
    """Raise PlanMismatch for a module that keeps running statistics (torch.nn.modules.batchnorm) and is in train
    mode."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats and module.training:
            raise PlanMismatch(
                f"module {name or type(module).__name__} ({type(module).__name__}) changes its running statistics in "
                "forward: replicas would drift apart",
                hint="use LayerNorm or GroupNorm, or track_running_stats=False, or put the module into eval()",
            )


class BufferWatch:
    """Notices a buffer that forward has changed (any module's, not only BatchNorm's), by tensor version counters."""

    def __init__(self, model: nn.Module) -> None:
        # Twice a step, so not by `named_buffers`, which goes through all modules; these dictionaries are their own.
        self._places = [(f"{name}." if name else "", module._buffers) for name, module in model.named_modules()]
        self._seen: dict[str, tuple[int, int]] = {}

    def remember(self) -> None:
        self._seen = self._versions()

    def check(self) -> None:
        """Raise PlanMismatch for the first buffer that is not as it was at `remember`."""
        for name, now in self._versions().items():
            if self._seen.get(name, now) != now:
                raise PlanMismatch(
                    f"buffer {name} was changed in forward: replicas would drift apart, and a replica that catches up "
                    "could not replay it",
                    hint="make it a value that does not outlive forward, or change it in the session's update callback",
                )

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {
            prefix + name: (id(buffer), buffer._version)
            for prefix, buffers in self._places
            for name, buffer in buffers.items()
            if buffer is not None
        }
