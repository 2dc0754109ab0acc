"""Flips one bit of this rank's memory, for tests of the divergence check: the action `flip` of a breakpoint.

A real flip comes when it likes. This one comes at a point of the step where what it hits is complete: in a reduced copy
before it is read (one that comes later, before the update, becomes part of the parameters and is found there), in a
parameter or in what an optimizer keeps for it at any time between two updates. Which bit is a matter of the seed.
"""

from __future__ import annotations

import random

import torch

from ftar_core.training.digests import StepCheck
from ftar_core.training.gradients import GradientTaker
from ftar_core.training.shards import local
from ftar_core.training.update import Update
from ftar_core.wire.breakpoints import Spec, Where


class Corruption:
    def __init__(self, taker: GradientTaker, update: Update, check: StepCheck) -> None:
        self._taker, self._update, self._check = taker, update, check

    def flip(self, spec: Spec) -> str:
        """In the training thread. What was flipped, in words; why nothing was, if there is nothing of that kind."""
        rng = random.Random(spec.seed)
        found = [(name, flat) for name, flat in self._candidates(spec.where) if flat.numel()]
        if not found:
            return f"no bit was flipped: there is no {spec.where.value} here (yet)"
        weights = [flat.numel() for _, flat in found]
        name, flat = rng.choices(found, weights)[0]
        at, bit = rng.randrange(flat.numel()), rng.randrange(8)
        with torch.no_grad():
            flat[at] ^= 1 << bit
        return f"bit {bit} of byte {at} of {name} was flipped"

    def _candidates(self, where: Where) -> list[tuple[str, torch.Tensor]]:
        if where is Where.REDUCED:
            self._check.read_again()
            named = [(f"reduced bucket {i}", t) for i, t in enumerate(self._taker.reduced[:-1])]
        elif where is Where.PARAMETER:
            named = [(f"parameter {name}", local(p)) for name, p in self._update.model.named_parameters()]
        else:
            named = [
                (f"optimizer state {key} of {name}", local(value))
                for name, parameter in self._update.model.named_parameters()
                for key, value in self._update.state_of(parameter)
                if isinstance(value, torch.Tensor) and value.layout is torch.strided
            ]
        return [(name, t.view(-1).view(torch.uint8)) for name, t in named if t.is_contiguous()]
