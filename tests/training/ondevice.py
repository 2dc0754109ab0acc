"""Memory that is said to be a device's: the control code of a session whose gradients are reduced where they are,
without a GPU. The lane's copies happen at once; the native ring has the CPU as its device."""

from __future__ import annotations

import torch

from ftar_core.native import core
from ftar_core.training import session
from ftar_core.training.devices import Event, Lane
from ftar_core.training.memories import DeviceMemory
from ftar_core.training.plan import BucketPlan

HERE = torch.device("cpu")


class Now:
    def wait(self) -> None: ...


class PromptLane:
    """Counts what goes through it, so that a test can tell that it was used."""

    def __init__(self) -> None:
        self.fetched = self.zeroed = self.brought = 0

    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def fetch(self, target: torch.Tensor, source: torch.Tensor, weight: float) -> object:
        self.fetched += 1
        target.copy_(source if weight == 1.0 else source * weight)
        return source

    def clear(self, target: torch.Tensor) -> None:
        self.zeroed += 1
        target.zero_()

    def used(self) -> Event:
        return Now()

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def bring(self, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self.brought += 1
        return source.to(like.dtype)

    def record(self) -> Event:
        return Now()

    def join(self, event: Event) -> None: ...


def reduce_on_the_cpu_as_a_device() -> None:
    """From here on, sessions of this process take their parameters' device for one with memory of its own."""

    def memory_for(place: str, plan: BucketPlan, lanes: dict[torch.device, Lane]) -> DeviceMemory:
        assert place == "device"
        return DeviceMemory(plan, HERE, lanes[HERE], core.host_device())

    session.lanes_of = lambda parameters: {HERE: PromptLane()}  # type: ignore[assignment]
    session.memory_for = memory_for  # type: ignore[assignment]
