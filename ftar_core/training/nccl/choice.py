"""What a session with data_plane="nccl" is made of, and why it would not work here."""

from __future__ import annotations

import torch
from torch import nn

from ftar_core import nccllib
from ftar_core.errors import SettingsError
from ftar_core.runtime.settings import Settings
from ftar_core.training.nccl.device import device_for
from ftar_core.training.nccl.plane import NCCL_TYPES, Parts
from ftar_core.training.nccl.retained import OnDevice, retain_there
from ftar_core.training.options import TrainingOptions
from ftar_core.training.plan import BucketPlan
from ftar_core.training.retention import Host, Retention


def nccl_parts(
    model: nn.Module, plan: BucketPlan, settings: Settings, options: TrainingOptions, host: Host
) -> tuple[Parts, OnDevice, Retention]:
    """The library, the device, and memory for gradients there. Raises SettingsError with the next thing to do."""
    device = device_for(parameter for parameter in model.parameters() if parameter.requires_grad)
    strange: set[torch.dtype] = {bucket.dtype for bucket in plan.buckets} - NCCL_TYPES.keys()
    if strange:
        raise SettingsError(
            f"data_plane='nccl': NCCL cannot add up {', '.join(sorted(map(str, strange)))}",
            hint="reduce in another type: TrainingOptions(reduce_dtype=torch.float32), or use data_plane='host'",
        )
    library = nccllib.load(settings.nccl_library)
    retained, retention = retain_there(plan, device, options.retain, options.retain_bytes, host)
    return Parts(library, device, options.nccl_join_s, options.nccl_abort_s), retained, retention


def patience_s(slot: int, members: int) -> float:
    """So long a member whose communicator has failed waits for an epoch without the one that is to blame, before it
    leaves itself: then somebody is gone, and a new communicator is made. A dead process is out in a fraction of a
    second, a dead link in one or two. If all members have failed alike nobody is to blame: the last slot leaves first,
    and each has a second to see it, so that one leaves and not all of them."""
    return 3.0 + min(members - 1 - slot, 30)
