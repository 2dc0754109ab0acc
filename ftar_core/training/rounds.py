"""Updates of a constant global batch: gradients of several steps are added up until enough batches are in.

A job whose update is meant for N batches, one a replica, has fewer replicas for a while. With `global_batch=N` it then
makes an update of several steps: each deals as many of the N batches as there are contributors, the last one what is
left, and the update runs behind the commit with which all N are trained. Steps, commits and deals are as ever, so data
stays exactly once, and what is in the works travels with the state to a replica that catches up. The deal says how many
batches the running update still lacks (protocol/sampler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ftar_core.errors import StateMismatch
from ftar_core.wire.messages import Deal


class Round:
    """Sums of gradients, weighted, and the tally with the sum of the weights, of the steps since the last update."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    def add(self, reduced: Sequence[torch.Tensor]) -> None:
        """The sums of one step (not divided)."""
        if not self._sums:
            self._sums = [bucket.clone() for bucket in reduced]
            return
        for total, bucket in zip(self._sums, reduced, strict=True):
            total.add_(bucket.to(total.device))  # what was fetched may be in host memory

    def drop(self) -> None:
        self._sums = []

    def take(self, reduced: Sequence[torch.Tensor]) -> bool:
        """The sums of all steps into `reduced`, and begin anew. False if there are none."""
        if not self._sums:
            return False
        for bucket, total in zip(reduced, self._sums, strict=True):
            bucket.copy_(total)
        self._sums = []
        return True

    def state_dict(self) -> dict[str, object]:
        return {"sums": list(self._sums)}

    def load_state_dict(self, state_dict: Mapping[str, object], /) -> None:
        sums = state_dict.get("sums")
        if not isinstance(sums, list) or not all(isinstance(total, torch.Tensor) for total in sums):
            raise StateMismatch("the state of the running update is not a list of tensors")
        self._sums = [total.clone() for total in sums]


def complete(following: Deal) -> bool:
    """The step before `following` was the last of its update."""
    return following.left == following.round
