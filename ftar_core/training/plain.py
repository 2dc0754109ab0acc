"""`session.allreduce`, `broadcast`, `barrier`: the user's tensors as plain operations (operations.py), and back.

Tensors of one dtype travel together. Those on a device are staged through the host; of a sharded tensor (DTensor) each
rank's part is reduced in that rank's ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ftar_core.errors import FtarError
from ftar_core.training.operations import Kind, Operation
from ftar_core.training.plan import DTYPE_CODES
from ftar_core.training.shards import around, local

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


def barrier(run: Callable[[Operation], torch.Tensor | None]) -> bool:
    """Whether all were there; False if `run` gives up."""
    return run(Operation(Kind.BARRIER, torch.empty(0))) is not None


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
