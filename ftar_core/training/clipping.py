"""Clipping by the global norm, whatever the parameters are: whole on every rank, sharded, or some of each.

`torch.nn.utils.clip_grad_norm_` does it for parameters of one kind; it cannot stack the norms of plain tensors and of
DTensors, or of DTensors on two meshes. Here each kind's norm is taken by itself (of DTensors over all ranks of their
mesh, so that what is sharded counts whole and what is replicated counts once), and then that of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ftar_core.training.shards import is_sharded


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """The norm before (a scalar tensor, the same on all ranks of a replica). Collective inside the replica. For use in
    the session's update, where gradients are final."""
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            groups.setdefault(gradient.device_mesh if is_sharded(gradient) else None, []).append(parameter)
    norms: list[torch.Tensor] = []
    for members in groups.values():
        norm: Any = nn.utils.get_total_norm([p.grad for p in members if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if is_sharded(norm) else norm)
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    for members in groups.values():
        nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total
