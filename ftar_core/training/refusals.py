"""What would be silently wrong across replicas, recognised before the replica joins.

A replica must hold all of its state: one that is lost takes its part of anything that is spread over replicas with it,
and one that comes back has nowhere to get that part from. So optimizers that shard their state over the data-parallel
ranks, and DDP over them, may span the ranks of one replica and no more.

They are recognised by name and attributes, not by type: Megatron and DeepSpeed are not imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ftar_core.errors import SettingsError
from ftar_core.runtime.settings import Settings

_GROUPS = ("process_group", "data_parallel_group", "dp_process_group")
_SHARDED = {  # module prefix, class -> what to set instead
    ("megatron.", "DistributedOptimizer"): "leave out --use-distributed-optimizer, or shard over one replica only: "
    "start each replica as a job of its own (its own MASTER_ADDR), so that data parallelism inside it ends there",
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"): "use fully_shard inside of a replica, which shards the "
    "optimizer with the parameters, or the plain optimizer",
    ("deepspeed.", "DeepSpeedZeroOptimizer"): "use ZeRO stage 0, or fully_shard inside of a replica",
    ("deepspeed.", "DeepSpeedZeroOptimizer_Stage3"): "use ZeRO stage 0, or fully_shard inside of a replica",
}


def refuse(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], settings: Settings) -> None:
    """Raises SettingsError, with the name of what does not fit and what to set instead."""
    for optimizer in optimizers:
        _check_optimizer(optimizer, settings)
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, nn.parallel.DistributedDataParallel):
                _check_ddp(name or type(part).__name__, part, settings)


def _check_optimizer(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    for member in _members(optimizer):
        for base in type(member).__mro__:
            known = ((m, c, hint) for (m, c), hint in _SHARDED.items() if base.__name__ == c)
            hint = next((hint for m, _, hint in known if base.__module__.startswith(m)), "")
            if not hint:
                continue
            ranks = next((_size(getattr(member, name)) for name in _GROUPS if getattr(member, name, None)), 0)
            over = f"the {ranks} ranks of its process group" if ranks else "its data-parallel ranks"
            if 0 < ranks <= settings.world_size:
                over += ": a rank holds its own part only, and state_dict() does not give it"
            raise SettingsError(
                f"optimizer {base.__name__} of {base.__module__.split('.')[0]} shards its state over {over}; "
                f"a replica of {settings.world_size} rank(s) could neither lose its part nor come back without it",
                hint=hint,
            )


def _members(optimizer: Any) -> list[Any]:
    """Megatron chains optimizers."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer, *chained] if isinstance(chained, list | tuple) else [optimizer]


def _check_ddp(name: str, ddp: nn.parallel.DistributedDataParallel, settings: Settings) -> None:
    ranks = _size(ddp.process_group)
    if ranks > settings.world_size:
        raise SettingsError(
            f"module {name}: DistributedDataParallel over {ranks} ranks, but this replica has {settings.world_size} "
            "(WORLD_SIZE): it would wait for replicas that are gone",
            hint="do not wrap the model across replicas, the session averages over them; inside of a replica start "
            "one torchrun a replica",
        )


def _size(group: Any) -> int:
    try:
        return int(dist.get_world_size(group))
    except (ValueError, RuntimeError, TypeError):
        size = getattr(group, "size", None)
        return int(size()) if callable(size) else 0
