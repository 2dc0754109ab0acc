"""Sharded tensors (`DTensor`): this rank's part, and a tensor of the same kind around another part.

FSDP2 and tensor parallelism keep each parameter as a DTensor: a global shape, a mesh of ranks, a placement, and the
local part of this rank, which may be empty. Rings and transfers move local parts only; rank i of every replica holds
the same part, since all replicas are built alike (the plan's hash and every fetched state are checked for it).

DTensor is not imported here: that costs a second, and a program that has not done so itself has no such tensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a tensor is. `owner`: of the ranks that hold the same part, this one speaks for it."""

    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    owner: bool


_places: dict[tuple[object, ...], Place] = {}  # the same few for thousands of parameters, at every snapshot


def is_sharded(tensor: object) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def is_split(tensor: torch.Tensor) -> bool:
    """The ranks hold different parts of it; a DTensor that is replicated is whole on each."""
    return is_sharded(tensor) and not all(p.is_replicate() for p in _any(tensor).placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory, detached; a plain tensor is its own part."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = _any(tensor).to_local()
    return part


def local_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, laid out as its parameter is (a partial sum over ranks is summed first, which is
    a collective)."""
    if is_sharded(gradient) and is_sharded(parameter) and _any(gradient).placements != _any(parameter).placements:
        gradient = _any(gradient.detach()).redistribute(placements=_any(parameter).placements)
    return local(gradient)


def placement(tensor: torch.Tensor) -> str:
    """How it is spread over the ranks, for comparison between replicas; empty for a plain tensor."""
    if not is_sharded(tensor):
        return ""
    return f"{tuple(_any(tensor).placements)} over {tuple(_any(tensor).device_mesh.shape)}"


def place_of(tensor: torch.Tensor) -> Place | None:
    """None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    template = _any(tensor)
    key = (tuple(tensor.shape), tuple(template.placements), id(template.device_mesh))
    found = _places.get(key)
    if found is None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(tensor.shape, template.device_mesh, template.placements)
        at = template.device_mesh.get_coordinate() or []
        owner = not any(p.is_replicate() and where for p, where in zip(template.placements, at, strict=True))
        found = _places[key] = Place(tuple(offsets), tuple(tensor.shape), owner)
    return found


def around(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`part` as a tensor of the kind of `like`, whose local part has that shape. Shares memory."""
    if not is_sharded(like):
        return part
    template = _any(like)
    made: torch.Tensor = type(template).from_local(
        part,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )
    return made


def _any(tensor: torch.Tensor) -> Any:
    """DTensor's own attributes, unknown to the type of a plain tensor."""
    return tensor
