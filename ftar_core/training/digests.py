"""What a replica says about its results in `Done`, so that a difference is found at the step where it arises.

The digest covers all reduced gradients and a rotating slice of the state before the step: one parameter and its
optimizer state, a different one each step, so that the whole state is covered in as many steps as there are
parameters, at the cost of reading one of them. Equal on all replicas, or something was corrupted: in transit, in a
copy, or in the state."""

from __future__ import annotations

import torch

from ftar_core.native import core
from ftar_core.training.gradients import GradientTaker
from ftar_core.training.plan import DTYPE_CODES, BucketPlan
from ftar_core.training.shards import local
from ftar_core.training.update import Update


def step_digest(plan: BucketPlan, taker: GradientTaker, update: Update, step: int) -> tuple[int, bool]:
    """(64-bit digest, are all reduced gradients finite and is there any weight). Reads memory once, without the GIL."""
    seed = step
    finite = taker.total_weight > 0
    for bucket in plan.all_buckets:
        address = taker.reduced[bucket.index].data_ptr()
        seed = core.digest(address, bucket.nbytes, seed)
        finite = finite and core.all_finite(address, bucket.count, DTYPE_CODES[bucket.dtype])
    return _state_slice(plan, update, step, seed), finite


def _state_slice(plan: BucketPlan, update: Update, step: int, seed: int) -> int:
    names = list(plan.slots)
    parameter = update.model.get_parameter(names[step % len(names)])
    seed = _tensor(parameter, seed)
    for _, value in update.state_of(parameter):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            seed = _tensor(value, seed)
    return seed


def _tensor(tensor: torch.Tensor, seed: int) -> int:
    host = local(tensor).cpu().contiguous()
    return core.digest(host.data_ptr(), host.numel() * host.element_size(), seed)
