"""What the control code needs of a device whose tensors pass through host memory: asynchronous copies, and events.

A lane is a queue of copies beside the stream that computes (on CUDA: a side stream). Copies of one lane are made in
order; each begins when the work is done that the calling thread had put on the device by then. Nobody may read a copy's
target, or write or free its source, before an event that was recorded behind it has come. It is never the stream that
computes that waits for one: a thread of the staging does (staging.py), or the device itself (`join`).

Tensors in host memory have no lane: they are copied where they are taken, without a thread or an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ftar_core.errors import SettingsError

LANES = ("cuda",)  # device types that have one


class Event(Protocol):
    def wait(self) -> None:
        """In a host thread, until everything before the event is done. Raises RuntimeError if the device failed."""


class Lane(Protocol):
    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer in host memory that the device copies to and from by itself."""

    def fetch(self, target: torch.Tensor, source: torch.Tensor, weight: float) -> object:
        """`target` (host, or on the device) = device `source` times `weight`. Returns what must stay alive until an
        event behind it."""

    def clear(self, target: torch.Tensor) -> None:
        """device `target` = 0, in its turn among the copies."""

    def used(self) -> Event:
        """Comes when all is done that the calling thread has put on the device so far, beside the lane."""

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """host `target` = device `source`, of one shape and dtype. Unlike `fetch` it is behind nothing that the
        device has to do: the source is complete, and stands still until an event behind the copy has come."""

    def bring(self, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A new tensor on the device of `like`, with its dtype, of host `source`'s values. Usable behind `join`."""

    def record(self) -> Event:
        """Comes when all copies so far are made."""

    def join(self, event: Event) -> None:
        """What the calling thread puts on the device from here on begins after `event`. Does not wait."""


class CudaLane:
    """A side stream of one GPU. Multiplies and converts there, so that only what the bucket holds crosses the bus."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def fetch(self, target: torch.Tensor, source: torch.Tensor, weight: float) -> object:
        self._follow()
        with torch.cuda.stream(self._stream):
            # The same roundings as on the CPU: another dtype is multiplied before it is rounded, its own after.
            scaled = source if weight == 1.0 else source * weight
            flat = scaled.to(target.dtype).contiguous()
            target.copy_(flat, non_blocking=True)
        return source, scaled, flat

    def clear(self, target: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.zero_()

    def used(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _CudaEvent(event)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def bring(self, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self._follow()
        with torch.cuda.stream(self._stream):
            there = source.to(self._device, non_blocking=True).to(like.dtype)
        there.record_stream(torch.cuda.current_stream(self._device))  # its memory is the side stream's
        return there

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaEvent(event)

    def join(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self._device).wait_event(event.event)

    def _follow(self) -> None:
        """Behind what this thread has put on the device: its own stream, not all of them."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


def lane_for(device: torch.device) -> Lane | None:
    """A lane of one's own, beside those of others; none for host memory."""
    return CudaLane(device) if device.type == "cuda" else None


def unpinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def host_memory(lanes: dict[torch.device, Lane] | None) -> Callable[[int, torch.dtype], torch.Tensor]:
    """How to get zeroed host memory: pinned where a device copies to it."""
    for lane in (lanes or {}).values():
        return lane.host
    return unpinned


def lanes_of(tensors: Iterable[torch.Tensor]) -> dict[torch.device, Lane]:
    """A lane for each device on which some of them are; none for host memory. Raises SettingsError for a device that
    has no values (meta), or of which nothing is known here."""
    found: dict[torch.device, Lane] = {}
    for tensor in tensors:
        device = tensor.device
        if device.type == "cpu" or device in found:
            continue
        if device.type == "meta":
            raise SettingsError(
                "parameters on the meta device have no values to train",
                hint="model.to_empty(device=...) and initialise them, before the session is made",
            )
        if device.type not in LANES:
            raise SettingsError(
                f"parameters on {device}: gradients can be taken from the cpu and from {', '.join(LANES)}",
                hint="move the model to one of them before the session is made",
            )
        found[device] = CudaLane(device)
    return found
