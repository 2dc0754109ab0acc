"""Gradients until the step is committed, beside the parameters: NCCL reduces from there, into buffers of their own."""

from __future__ import annotations

from ftar_core.errors import SettingsError
from ftar_core.training.devices import unpinned
from ftar_core.training.nccl.device import Device
from ftar_core.training.plan import BucketPlan
from ftar_core.training.retention import Host, Kept, Retention


class OnDevice(Kept):
    """[bucket] is on the device; of the tally, which the host makes and the host's ring reduces, in host memory."""

    def __init__(self, plan: BucketPlan, device: Device, host: Host = unpinned) -> None:
        self._device = device
        try:
            there = [device.memory(bucket.count, bucket.dtype) for bucket in plan.buckets]
        except RuntimeError as error:  # torch's allocator
            raise MemoryError(str(error)) from None
        self._buffers = [*there, host(plan.tally.count, plan.tally.dtype)]

    def squares(self, bucket: int) -> float:
        return self._device.squares(self._buffers[bucket])


def retain_there(plan: BucketPlan, device: Device, asked: str, limit: int, host: Host) -> tuple[OnDevice, Retention]:
    """The buffers, as `retain` asks for. Raises SettingsError: they cannot be elsewhere, or there is no memory."""
    if asked not in ("auto", "device"):
        raise SettingsError(
            f"retain={asked!r} with data_plane='nccl': gradients are reduced on the device, and kept there",
            hint="use retain='auto', or data_plane='host'",
        )
    if limit and plan.nbytes > limit:
        raise SettingsError(
            f"the gradients ({plan.nbytes} bytes) are more than retain_bytes={limit}",
            hint="raise retain_bytes, shard the model over more ranks, or use data_plane='host'",
        )
    try:
        made = OnDevice(plan, device, host)
    except MemoryError as error:
        raise SettingsError(
            f"data_plane='nccl': no memory for {plan.nbytes} bytes of gradients on the device: {error}",
            hint="shard the model over more ranks, or use data_plane='host', which keeps them in host memory",
        ) from None
    return made, Retention("device", f"{plan.nbytes} bytes of gradients are kept where NCCL reduces them")
