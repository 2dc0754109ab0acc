"""Where the buckets of gradients are while they are reduced: in host memory, or on the device that made them.

    host      a device's gradients are copied to pinned host memory, the ring adds there, results are copied back
    device    buckets and results stay on the device; the native ring passes chunks between it and the links and lets
              the device add (native/csrc/device.h). The same bits, and no gradient-sized copies.

`host` is the default: `device` has not been measured on a GPU. The tally, four numbers that the host reads at every
step, is in host memory either way. A bucket goes to the ring when its copies are complete on the device (staging.py),
rather than with an event for the ring's stream to wait for: so the ring's work never waits for the training's kernels,
an abort waits for milliseconds, and a device that takes long is one that hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ftar_core.errors import SettingsError
from ftar_core.native import core
from ftar_core.training.devices import Lane
from ftar_core.training.plan import DTYPE_CODES, BucketPlan

if TYPE_CHECKING:
    from ftar_core.native._core import Device

PLACES = ("host", "device")


class HostMemory:
    """The buckets of the ring are in host memory, whatever the parameters' device."""

    on_device: frozenset[int] = frozenset()  # buckets
    native: Device | None = None

    def check(self, buckets: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, bool]]:
        """(digest, is all of it finite) of each bucket (its number, its values); reads memory without the GIL."""
        return [core.check(t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype], index) for index, t in buckets]


class DeviceMemory:
    """All buckets but the tally are on one device. `lane`: of that device."""

    def __init__(self, plan: BucketPlan, device: torch.device, lane: Lane, native: Device) -> None:
        self.on_device = frozenset(bucket.index for bucket in plan.buckets)
        self.device, self.lane, self.native = device, lane, native
        self._measuring = torch.cuda.Stream(device) if device.type == "cuda" else None

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that every stream may use at once. Raises RuntimeError (torch's allocator)."""
        made = torch.zeros(count, dtype=dtype, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before the training begins
        return made

    def squares(self, source: torch.Tensor) -> float:
        """The sum of squares of a bucket that is complete; of integers 0. Waits for that, and for no other work."""
        if not source.is_floating_point():
            return 0.0
        with torch.cuda.stream(self._measuring):  # None: as it is
            return float(torch.linalg.vector_norm(source, dtype=torch.float64)) ** 2

    def check(self, buckets: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, bool]]:
        """As `HostMemory.check`; raises RuntimeError if the device failed."""
        there = [(index, tensor) for index, tensor in buckets if index in self.on_device]
        here = [(index, tensor) for index, tensor in buckets if index not in self.on_device]
        areas = [(t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype], index) for index, t in there]
        found = dict(zip((i for i, _ in there), self.native.check(areas), strict=True)) if there else {}
        found.update(zip((i for i, _ in here), HostMemory().check(here), strict=True))
        return [found[index] for index, _ in buckets]


Memory = HostMemory | DeviceMemory


def memory_for(place: str, plan: BucketPlan, lanes: dict[torch.device, Lane]) -> Memory:
    """As asked with FTAR_REDUCE. Raises SettingsError for what cannot be."""
    if place == "host":
        return HostMemory()
    if place not in PLACES:
        raise SettingsError(f"reduce={place!r}: no such place", hint=f"write one of: {', '.join(PLACES)}")
    if len(lanes) != 1:
        what = "they are in host memory" if not lanes else f"they are on {', '.join(str(d) for d in lanes)}"
        raise SettingsError(
            f"FTAR_REDUCE=device: all parameters of a rank must be on one GPU, but {what}",
            hint="set FTAR_REDUCE=host, or unset it",
        )
    ((device, lane),) = lanes.items()
    try:
        native = core.cuda_device(device.index if device.index is not None else torch.cuda.current_device())
    except RuntimeError as error:
        raise SettingsError(f"FTAR_REDUCE=device: {error}", hint="set FTAR_REDUCE=host, or unset it") from None
    return DeviceMemory(plan, device, lane, native)
