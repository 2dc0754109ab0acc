"""`session.allreduce`, `broadcast`, `barrier`: the user's tensors as plain operations (operations.py), and back.

Tensors of one dtype travel together. Those on a device are staged through the host; of a sharded tensor (DTensor) each
rank's part is reduced in that rank's ring.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import overload

import torch

from ftar_core.errors import FtarError
from ftar_core.training.operations import Kind, Operation
from ftar_core.training.plan import DTYPE_CODES
from ftar_core.training.shards import around, local


class PlainTensors(abc.ABC):
    """The part of a session for tensors of the user's own."""

    @abc.abstractmethod
    def _operate(self, operation: Operation) -> torch.Tensor | None:
        """The result; None where there are no others. Raises FtarError outside of a turn."""

    @overload
    def allreduce(self, tensors: torch.Tensor, op: str = "sum") -> torch.Tensor: ...
    @overload
    def allreduce(self, tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]: ...
    def allreduce(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], op: str = "sum"
    ) -> torch.Tensor | list[torch.Tensor]:
        """Sum or mean of a tensor, or of each of a list, over the replicas that contribute to the running step; new
        tensors, the given ones stay as they are. Rank i of a replica reduces with rank i of the others.

        Between the beginning of a turn and its `step()`, by all replicas alike. All that go on have the same bits,
        whoever is lost meanwhile: with the values of the lost one if anybody had the result by then, else without. A
        turn without a batch of its own (`warming_up`) adds zeros and does not count in the mean; in a shadow's warm-up
        the result is what was given.

        Raises FtarError outside of a turn, for another dtype, and if another replica is about to do something else.
        """
        many = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        found = operate(many, kind_of(op), self._operate) or [tensor.detach().clone() for tensor in many]
        return found[0] if isinstance(tensors, torch.Tensor) else found

    def broadcast(self, tensor: torch.Tensor, source: str = "") -> torch.Tensor:
        """The tensor of replica `source` (default: the first contributor that has a batch) on all contributors, bit
        for bit. Otherwise as `allreduce`. Raises FtarError if `source` does not contribute."""
        found = operate([tensor], Kind.BROADCAST, self._operate, source)
        return found[0] if found else tensor.detach().clone()

    def barrier(self) -> None:
        """Returns when all contributors are here. Otherwise as `allreduce`."""
        self._operate(Operation(Kind.BARRIER, torch.empty(0)))


KINDS = {"sum": Kind.SUM, "mean": Kind.MEAN, "avg": Kind.MEAN}


def operate(
    tensors: Sequence[torch.Tensor], kind: Kind, run: Callable[[Operation], torch.Tensor | None], source: str = ""
) -> list[torch.Tensor] | None:
    """New tensors, shaped as the given ones. None if `run` gives none. Raises FtarError."""
    groups: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        _check(tensor, kind)
        groups.setdefault(tensor.dtype, []).append(number)
    results: dict[int, torch.Tensor] = {}
    for dtype, numbers in groups.items():
        parts = [local(tensors[number]) for number in numbers]
        given = torch.empty(sum(part.numel() for part in parts), dtype=dtype)
        torch.cat([part.reshape(-1).cpu() for part in parts], out=given)
        result = run(Operation(kind, given, source))
        if result is None:
            return None
        pieces = result.split([part.numel() for part in parts])
        for number, part, piece in zip(numbers, parts, pieces, strict=True):
            # A copy: the result is kept for members that do not have it yet.
            mine = torch.empty(part.shape, dtype=dtype, device=part.device).copy_(piece.view(part.shape))
            results[number] = around(mine, tensors[number])
    return [results[number] for number in range(len(tensors))]


def kind_of(op: str) -> Kind:
    if op not in KINDS:
        raise FtarError(f"allreduce with op={op!r}: sum or mean is expected")
    return KINDS[op]


def _check(tensor: object, kind: Kind) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise FtarError(f"a {type(tensor).__name__} is no tensor", hint="give a torch.Tensor, or a list of them")
    name = kind.name.lower()
    if tensor.dtype not in DTYPE_CODES or tensor.layout is not torch.strided:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
        raise FtarError(f"{name} of {tensor.dtype} ({tensor.layout}) is not possible", hint=f"give dense {known}")
    if kind is Kind.MEAN and not tensor.dtype.is_floating_point:
        raise FtarError(f"a mean of {tensor.dtype} would be rounded", hint="use op='sum', or convert it to a float")
