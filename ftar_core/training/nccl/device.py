"""What the data plane over NCCL needs of a device: memory there, a stream for NCCL, and copies back to the host.

Two streams beside the one that computes: NCCL's operations are in order on the first, copies of results on the second,
so that a copy is made while the next bucket is reduced. Threads of the plane wait for events; the stream that computes
never waits, and nothing waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ftar_core.errors import SettingsError
from ftar_core.training.devices import Event


class Device(Protocol):
    stream: int  # a cudaStream_t, for NCCL

    def enter(self) -> None:
        """What the calling thread does from here on, it does on this device."""

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat zeroed buffer there, which may be used at once."""

    def mark(self) -> Event:
        """Comes when all that is on `stream` by now is done (or was aborted)."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin host `target` = device `source`, which is complete."""

    def squares(self, source: torch.Tensor) -> float:
        """The sum of squares of a flat buffer there, which is complete; of integers 0. Waits for that alone."""


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reducing, self._back, self._measuring = (torch.cuda.Stream(device) for _ in range(3))
        self.stream: int = self._reducing.cuda_stream

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.zeros(count, dtype=dtype, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()  # before the training begins
        return made

    def mark(self) -> Event:
        return _Mark(self._reducing)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
        return _Mark(self._back)

    def squares(self, source: torch.Tensor) -> float:
        if not source.is_floating_point():
            return 0.0
        with torch.cuda.stream(self._measuring):
            return float(torch.linalg.vector_norm(source, dtype=torch.float64)) ** 2


class _Mark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # the thread sleeps; without, it spins
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


DEVICES: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}  # by the type of a torch.device


def device_for(parameters: Iterable[torch.Tensor]) -> Device:
    """Of a rank's parameters. Raises SettingsError where NCCL cannot reduce their gradients."""
    found = sorted({parameter.device for parameter in parameters}, key=str)
    for device in found:
        if device.type not in DEVICES:
            raise SettingsError(
                f"data_plane='nccl' with parameters on {device}: NCCL reduces gradients on {', '.join(DEVICES)} only",
                hint="move the model there before the session is made, or use data_plane='host'",
            )
    if len(found) != 1:
        raise SettingsError(
            f"data_plane='nccl' with parameters on {len(found)} devices ({', '.join(map(str, found))}): one rank has "
            "one communicator, of one device",
            hint="give each rank one device, or use data_plane='host'",
        )
    return DEVICES[found[0].type](found[0])
