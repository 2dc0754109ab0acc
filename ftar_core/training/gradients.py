"""Takes gradients as backward produces them, keeps them for a retry, and hands the reduced ones back.

A hook on every parameter (`register_post_accumulate_grad_hook`) copies its gradient, times the weight of this replica's
batch, into a flat bucket and drops the original. That copy is the whole retention: when a replica is lost the step is
reduced again from these buckets, whose bytes nobody has touched, because results arrive in buffers of their own. So a
step holds one set of gradients for the retry and one for the results, and no third. Where there is no memory for the
first, buckets last only until they are reduced (retention.py).

A bucket is announced the moment its last gradient is there, while backward goes on: the all-reduce overlaps with it.
Parameters without a gradient are filled with zeros when the step asks for the results. Of a sharded parameter (FSDP2,
tensor parallelism) each rank takes and gives back its own part; FSDP2 runs these hooks after its reduce-scatter.

One backward a step. More than one (gradient accumulation) is said with `accumulate()`: inside it gradients add up in
`.grad` as usual, and the first backward outside takes the sums. A second backward without it is an error, since buckets
of the first may already be on their way.

What `DistributedDataParallel` wraps inside a replica is taken when the step asks for it: the hooks run before DDP has
averaged over the ranks, and what it writes to `.grad` afterwards is what counts. Under its `no_sync`, and under FSDP2's
`set_requires_gradient_sync(False)`, no `accumulate()` is needed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import nn

from ftar_core.errors import FtarError
from ftar_core.native import core
from ftar_core.training.devices import Lane, host_memory
from ftar_core.training.memories import HostMemory, Memory
from ftar_core.training.plan import DTYPE_CODES, BucketPlan, Slot, trainable
from ftar_core.training.retention import Inputs, Kept, buffers
from ftar_core.training.shards import around, is_sharded, local, local_gradient
from ftar_core.training.staging import Staging

# Up to here the sum of squares is taken when backward is over and the ring is waited for, from what caches still have.
# Larger gradients are read while their bucket is in them.
MEASURED_LATER_BYTES = 16 << 20


class Mode(Enum):
    """What a hook does with a gradient."""

    OFF = "off"  # leave it in .grad: no session is running
    TAKE = "take"  # copy it into its bucket
    ACCUMULATE = "accumulate"  # leave it in .grad until the last backward of the step
    DISCARD = "discard"  # a shadow's warm-up step: drop it
    ZERO = "zero"  # a turn without a batch of its own: drop it, and fill its bucket with zeros


class GradientTaker:
    """Hooks and buffers of one model. `on_bucket(index)` is called in the thread of backward, at most once a step and
    bucket; with `lanes`, in the thread of their staging. Buffers live in host memory; gradients of parameters elsewhere
    are copied there and back (staging.py), or, where `memory` says so, stay there in buffers of their device."""

    def __init__(
        self,
        model: nn.Module,
        plan: BucketPlan,
        on_bucket: Callable[[int], None],
        inputs: Inputs | None = None,
        lanes: dict[torch.device, Lane] | None = None,
        *,
        memory: Memory | None = None,
    ) -> None:
        self.plan = plan
        self.weight = 1.0  # of this replica's batch; set before backward
        self.mode = Mode.OFF
        self._on_bucket = on_bucket
        self._lock = threading.Lock()  # several devices run backward in several threads
        self._parameters = trainable(model)
        self._late = _averaged_by_ddp(model, self._parameters)
        self._weight_taken: float | None = None
        self._taken: set[str] = set()
        self._missing = [len(bucket.slots) for bucket in plan.buckets]
        self._closed: set[int] = set()
        self._staging = Staging(lanes, self._announce_now) if lanes else None
        host = host_memory(lanes)
        self.memory: Memory = memory or HostMemory()
        self.retained: Inputs = inputs if inputs is not None else Kept(plan, host, memory)
        self._finite = True  # all inputs of this step; looked at where they are not kept
        self._squares = 0.0  # their sum of squares, so far
        self._measures_later = self.retained.keeps and plan.nbytes <= MEASURED_LATER_BYTES
        self._unmeasured: list[int] = []
        self.reduced = buffers(plan, host, memory)
        self._outputs = {name: _view(self.reduced, slot) for name, slot in plan.slots.items()}
        kept = plan.slots if self.retained.keeps else {}
        self._kept = {name: _view(self.retained, slot) for name, slot in kept.items()}
        # Made once: they share the memory of the results.
        self._whole = {
            name: around(self._outputs[name], p)
            for name, p in self._parameters.items()
            if is_sharded(p) and p.dtype == self._outputs[name].dtype
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(name))
            for name, parameter in self._parameters.items()
            if name not in self._late
        ]

    def _make_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._take(name, parameter)

        return hook

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        mode = self.mode
        if mode in (Mode.OFF, Mode.ACCUMULATE):
            return
        gradient, parameter.grad = parameter.grad, None
        if mode is Mode.DISCARD or gradient is None:
            return
        slot = self.plan.slots[name]
        with self._lock:
            if name in self._taken or slot.bucket in self._closed:
                raise FtarError(
                    f"parameter {name}: a second gradient in one step, after the first was already taken",
                    hint="wrap all but the last backward of a step in `with session.accumulate():`, and call plain "
                    "operations (allreduce, broadcast, barrier) before the first or after the last backward",
                )
            self._taken.add(name)
            if self._weight_taken is None:
                self._weight_taken = self.weight if mode is Mode.TAKE else 0.0
            weight = self._weight_taken
        if gradient.layout is not torch.strided:
            raise FtarError(
                f"parameter {name}: its gradient is sparse, which cannot be all-reduced",
                hint="make the embedding with sparse=False",
            )
        self._put(name, gradient, parameter, weight)
        with self._lock:
            self._missing[slot.bucket] -= 1
            full = self._missing[slot.bucket] == 0
            if full:
                self._closed.add(slot.bucket)
        if full:
            self._announce(slot.bucket)

    def _announce(self, bucket: int) -> None:
        if self._staging is not None:
            self._staging.full(bucket)
        else:
            self._announce_now(bucket)

    def _announce_now(self, bucket: int) -> None:
        if bucket == self.plan.tally.index:
            self._on_bucket(bucket)
        elif self._measures_later:
            self._on_bucket(bucket)
            with self._lock:
                self._unmeasured.append(bucket)
        elif self.retained.keeps:
            self._on_bucket(bucket)
            self._measure(bucket)  # while the ring reads it, too
        else:
            layout, inputs = self.plan.buckets[bucket], self.retained[bucket]
            self._finite = self._finite and core.all_finite(inputs.data_ptr(), layout.count, DTYPE_CODES[layout.dtype])
            self._measure(bucket)
            self._on_bucket(bucket)

    def _measure(self, bucket: int) -> None:
        squares = self.retained.squares(bucket)
        with self._lock:
            self._squares += squares

    def measure(self) -> None:
        """After `finish`, while there is nothing else to do: what `own_norm` is made of."""
        with self._lock:
            unmeasured, self._unmeasured = self._unmeasured, []
        for bucket in unmeasured:
            self._measure(bucket)

    @property
    def own_norm(self) -> float:
        """Euclidean norm of this replica's own gradient, this rank's part, before the reduction; 0: it has none. May be
        infinite."""
        self.measure()
        weight = self.weight if self._weight_taken is None else self._weight_taken
        return math.sqrt(self._squares) / abs(weight) if weight and self._squares >= 0 else 0.0

    def inputs_finite(self) -> bool:
        """Were all gradients of this replica's own finite?"""
        if not self.retained.keeps:
            return self._finite
        return all(bool(torch.isfinite(self.retained[b.index]).all()) for b in self.plan.all_buckets)

    def _put(self, name: str, gradient: torch.Tensor, parameter: torch.Tensor, weight: float) -> None:
        part = local_gradient(gradient, parameter)
        slot = self.plan.slots[name]
        target = self._kept.get(name)
        if target is None:
            target = _view(self.retained, slot)
        if weight == 0.0:
            self._clear(slot.bucket, target)  # what counts for nothing may be NaN
            return
        if self._staging is not None and self._staging.lane(part) is not None:
            self._staging.fetch(slot.bucket, target, part, weight)
            return
        if weight != 1.0 and part.dtype != target.dtype:
            part = part * weight  # before it is rounded
            weight = 1.0
        target.copy_(part)
        if weight != 1.0:
            target.mul_(weight)

    def _clear(self, bucket: int, target: torch.Tensor) -> None:
        if self._staging is not None and self._staging.lane(target) is not None:
            self._staging.clear(bucket, target)
        else:
            target.zero_()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gradients of backwards inside add up in `.grad`; the next backward outside takes the sums."""
        before, self.mode = self.mode, Mode.ACCUMULATE if self.mode in (Mode.TAKE, Mode.ZERO) else self.mode
        try:
            yield
        finally:
            self.mode = before

    def begin(self, mode: Mode) -> None:
        """A new step: nothing taken, no gradient left over in `.grad`."""
        if self._staging is not None:
            self._staging.drop()
            if self.memory.on_device:
                self._staging.used()  # by the update that was
        for parameter in self._parameters.values():
            parameter.grad = None
        with self._lock:
            self._taken.clear()
            self._closed.clear()
            self._missing = [len(bucket.slots) for bucket in self.plan.buckets]
            self._weight_taken = None
            self._unmeasured.clear()
        self._finite = True
        self._squares = 0.0
        self.weight = 1.0
        self.mode = mode

    def finish(self, *, tokens: float, loss: float | None, weight: float | None = None) -> None:
        """Close the step's buckets: zeros for what has no gradient, then the tally. `weight` 0 for a step without a
        batch. A loss that is not finite is left out of the mean (the gradients tell the verdict, not the loss)."""
        if weight is None:
            weight = self.weight if self._weight_taken is None else self._weight_taken
        self._close(weight)
        tally = self.plan.tally.index
        counted = (weight * loss, weight) if loss is not None and math.isfinite(loss) else (0.0, 0.0)
        self.retained[tally].copy_(torch.tensor([weight, tokens, *counted], dtype=torch.float64))
        self._closed.add(tally)
        self._announce(tally)
        self._flush()  # the results are waited for next, in any case

    def before_operation(self) -> None:
        """A plain operation between backward and the end of the step, for which this replica is about to wait: first
        all buckets go to the ring, in which another replica may have put them already. (It may use other parameters
        than this one, and nobody may wait for something behind a bucket that he holds back.)"""
        if self._taken and self.mode in (Mode.TAKE, Mode.ZERO):
            self._close(self.weight if self._weight_taken is None else self._weight_taken)
        self._flush()

    def _flush(self) -> None:
        if self._staging is not None:
            self._staging.flush()

    def results_free(self) -> None:
        """Returns when nobody reads the results any more: before they are written by anybody but the ring."""
        if self._staging is not None:
            self._staging.results_free()

    def _close(self, weight: float) -> None:
        """Zeros for what has no gradient."""
        for bucket in self.plan.buckets:
            if bucket.index in self._closed:
                continue
            for slot in bucket.slots:
                if slot.name not in self._taken:
                    parameter = self._parameters[slot.name]
                    if parameter.grad is not None and self.mode is Mode.TAKE and weight != 0.0:
                        # Left by accumulate() with no backward after it for this parameter, or put there without a
                        # hook being run (DDP's; FSDP2 before torch 2.7).
                        self._put(slot.name, parameter.grad, parameter, weight)
                    else:
                        self._clear(slot.bucket, _view(self.retained, slot))
            self._closed.add(bucket.index)
            self._announce(bucket.index)

    @property
    def total_weight(self) -> float:
        """Sum of the contributors' weights in the reduced tally."""
        return float(self.reduced[-1][0])

    @property
    def total_tokens(self) -> float:
        return float(self.reduced[-1][1])

    @property
    def loss_weight(self) -> float:
        """Of the contributors that told a loss."""
        return float(self.reduced[-1][3])

    @property
    def mean_loss(self) -> float | None:
        """Weighted mean of the contributors' losses; None when nobody had a batch or a loss."""
        weight = float(self.reduced[-1][3])
        return float(self.reduced[-1][2]) / weight if weight > 0 else None

    def average(self) -> None:
        """The one division: reduced sums by the summed weight, in place."""
        weight = self.total_weight
        if weight in (0.0, 1.0):
            return
        for bucket in self.plan.buckets:
            self.reduced[bucket.index].div_(weight)

    def give_back(self) -> None:
        """Every parameter's `.grad` becomes its reduced gradient (a view of the result buffer where the device
        allows)."""
        for name, parameter in self._parameters.items():
            output = self._outputs[name]
            staged = self.plan.slots[name].bucket not in self.memory.on_device
            if staged and self._staging is not None and self._staging.lane(parameter) is not None:
                parameter.grad = around(self._staging.bring(output, local(parameter)), parameter)
            elif parameter.device != output.device or parameter.dtype != output.dtype:
                parameter.grad = around(output.to(parameter.device, parameter.dtype), parameter)
            else:
                parameter.grad = self._whole.get(name, output)
        if self._staging is not None:
            self._staging.brought()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.mode = Mode.OFF
        if self._staging is not None:
            self._staging.close()


def _averaged_by_ddp(model: nn.Module, parameters: dict[str, nn.Parameter]) -> set[str]:
    """Names of the parameters whose gradients DDP averages over the ranks of the replica."""
    wrapped: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ignored: set[str] = set(module.parameters_to_ignore)
            wrapped |= {id(p) for name, p in module.module.named_parameters() if name not in ignored}
    return {name for name, parameter in parameters.items() if id(parameter) in wrapped}


def _view(buffers: Inputs | list[torch.Tensor], slot: Slot) -> torch.Tensor:
    return buffers[slot.bucket][slot.offset : slot.offset + slot.count].view(slot.shape)
