"""Copies of a contributor's state for shadows: made beside the training, never in its way.

Parameters change in the update and nowhere else, so from the end of one update to the beginning of the next the state
stands still while forward, backward and the reduction run. A thread of its own copies it to host memory in that time,
in slices during which the interpreter is free; when the next update is due and the copy is not done, it is abandoned,
and begins again behind that update. Only when that happens again and again is an update made to wait a little. What
is on a device goes through a lane (devices.py) of the copier's own into memory that the device writes by itself:
beside the kernels of the training, and not behind them.

A copy begins right behind an update, when it has the whole step, for everybody who has asked by then: replicas update
at the same time, so sources that were asked together hold the same step. A job that stands still (it holds, or a
straggler keeps everybody waiting) has no next update soon: there the copy begins after a short wait.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ftar_core.training.devices import Event, Lane, lane_for
from ftar_core.training.pieces import PIECE_BYTES, Layout, pieces_of, whole_digest
from ftar_core.training.state import EncodedState, LiveState, TensorInfo, empty_tensor, layout_hash, raw_bytes
from ftar_core.training.stateconn import checksum
from ftar_core.wire.ids import EpochId

log = logging.getLogger(__name__)
SLICE_BYTES = 1024 * 1024  # well below a millisecond: so long can the end of a copy be waited for
LANE_BYTES = 16 * 1024 * 1024  # of a device at a time: less than a millisecond of its bus
LANE_AHEAD = 2  # slices that are queued beyond the one that is waited for
PATIENT_COPIES = 2  # abandoned one after the other, before an update waits for one
FIRST_WAIT = 0.1  # of a step; twice as long each time


def wait_for_copy_s(abandoned: int, step_s: float, most_s: float, patience: float = 0.0) -> float:
    """How long an update may wait for a copy, when so many before it were abandoned. Pure. `patience`: of a step, from
    the first on (for one that nobody asks for again a moment later).

    A copy that never gets done within a step would keep a replica out for good, which costs more than a short wait: so
    the third may take a tenth of a step more, and each further one twice as much, up to `most_s`."""
    if abandoned < PATIENT_COPIES:
        return min(most_s, step_s * patience)
    return min(most_s, step_s * FIRST_WAIT * 2.0 ** min(abandoned - PATIENT_COPIES, 30))


class Held:
    """The state after `step` in host memory, as a row of pieces."""

    def __init__(self, step: int, epoch: EpochId, state: EncodedState, now: float) -> None:
        self.step, self.epoch, self.state = step, epoch, state
        self.layout = layout_hash(state.skeleton, state.infos)
        self.users = 0  # connections that fetch it
        self.idle_since = now
        self._memories = [raw_bytes(tensor) for tensor in state.tensors]
        self._row = Layout([len(memory) for memory in self._memories])
        self.count = pieces_of(self._row.total)
        self._sums: list[int | None] = [None] * self.count

    @property
    def nbytes(self) -> int:
        return self._row.total

    def piece(self, number: int) -> tuple[list[memoryview], int, int]:
        """(its bytes, how many, their checksum)"""
        start = number * PIECE_BYTES
        end = min(self._row.total, start + PIECE_BYTES)
        buffers = self._row.buffers(self._memories, start, end)
        found = self._sums[number]
        if found is None:
            found = self._sums[number] = checksum(buffers)
        return buffers, end - start, found

    def whole(self) -> bytes:
        return whole_digest([self.piece(number)[2] for number in range(self.count)])


@dataclass
class _Copy:
    live: LiveState
    step: int
    epoch: EpochId
    began: float
    ready: Callable[[], None]  # returns when the device has finished what the copy depends on
    patience: float = 0.0  # of a step: so long may an update wait for it
    tensors: list[torch.Tensor] = field(default_factory=list)
    copied_bytes: int = 0
    done: bool = False


class Copier:
    """One copy at a time, in a thread of its own. `done(held)` is called there, before `settle` returns."""

    def __init__(
        self, done: Callable[[Held], None], lane_for: Callable[[torch.device], Lane | None] = lane_for
    ) -> None:
        self._done = done
        self._lane_for = lane_for
        self._lanes: dict[torch.device, Lane | None] = {}
        self._changed = threading.Condition()
        self._next: _Copy | None = None
        self._running: _Copy | None = None
        self._stop = self._closed = False
        self._thread: threading.Thread | None = None
        self._memory: list[torch.Tensor] = []  # of a copy that was abandoned: the next one needs not ask for new
        self.abandoned = 0  # copies, one after the other
        self.bytes_per_s = 0.0  # of the last
        self.text = ""  # why nobody got a copy lately

    @property
    def busy(self) -> bool:
        with self._changed:
            return self._next is not None or self._running is not None

    def start(self, live: LiveState, step: int, epoch: EpochId, patience: float = 0.0) -> None:
        """In the training thread, between two updates. Not while busy."""
        for device in {tensor.device for tensor in live.tensors} - self._lanes.keys():
            self._lanes[device] = self._lane_for(device)
        copy = _Copy(live, step, epoch, time.monotonic(), _device_ready(live), patience)
        with self._changed:
            if self._closed:
                return
            self._next, self._stop = copy, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftar-copier", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, step_s: float = 0.0, most_s: float = 0.0) -> bool:
        """In the training thread, before an update: after it no tensor is read any more. A copy that is not done may
        get some more time (wait_for_copy_s), then it is abandoned. False if so."""
        with self._changed:
            copy = self._running or self._next
            if copy is None:
                return True
            wait_s = wait_for_copy_s(self.abandoned, step_s, most_s, copy.patience)
            if wait_s > 0:
                self._changed.wait_for(lambda: self._running is None and self._next is None, wait_s)
            self._stop = True
            self._next = None
            self._changed.wait_for(lambda: self._running is None)
            if copy.done:
                return True
            self.abandoned += 1
            took_s = time.monotonic() - copy.began
            self.text = (
                f"a copy of the state ({copy.live.nbytes} bytes) does not get done within a step: "
                f"{copy.copied_bytes} bytes in {took_s * 1000:.0f} ms, abandoned {self.abandoned} times; updates wait "
                f"for it a little longer each time, up to {most_s:g} s (TrainingOptions.snapshot_wait_s)"
            )
            return False

    def close(self) -> None:
        with self._changed:
            self._closed = self._stop = True
            self._next = None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=2.0)

    # --- the copier's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next is not None)
                if self._closed:
                    return
                copy, self._running, self._next = self._next, self._next, None
            held = None
            if copy is not None:
                held = self._try(copy)
            if copy is not None and held is not None:
                self._done(held)
                copy.done = True
            with self._changed:
                self._running = None
                self._changed.notify_all()
            if held is not None:
                self._sum(held)

    def _try(self, copy: _Copy) -> Held | None:
        try:
            return self._copy(copy)
        except Exception as error:  # noqa: BLE001 - of the device, or no memory: the training goes on as long as it can
            self.text = f"the state after step {copy.step} could not be copied: {error}"
            log.warning("%s", self.text)
            self._memory = []
            return None

    def _copy(self, copy: _Copy) -> Held | None:
        copy.ready()
        fits = len(self._memory) == len(copy.live.tensors) and all(
            (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(self._memory, copy.live.tensors, strict=False)
        )
        memory, self._memory = self._memory, []
        copy.tensors = (
            memory
            if fits
            else [self._host(info, tensor) for info, tensor in zip(copy.live.infos, copy.live.tensors, strict=True)]
        )
        for source, target in zip(copy.live.tensors, copy.tensors, strict=True):
            if not self._copy_one(copy, source, target):
                self._memory = copy.tensors
                return None
        now = time.monotonic()
        self.bytes_per_s = copy.live.nbytes / max(now - copy.began, 1e-6)
        self.abandoned, self.text = 0, ""
        log.info(
            "state after step %d copied: %d bytes in %.1f ms beside the training",
            copy.step,
            copy.live.nbytes,
            (now - copy.began) * 1000,
        )
        state = EncodedState(copy.live.skeleton, copy.live.infos, tuple(copy.tensors), copy.live.places)
        return Held(copy.step, copy.epoch, state, now)

    def _copy_one(self, copy: _Copy, source: torch.Tensor, target: torch.Tensor) -> bool:
        """False: told to stop before the end."""
        size = target.numel() * target.element_size()
        if (lane := self._lanes.get(source.device)) is not None:
            return self._read(copy, lane, source.detach(), target)
        if source.device.type != "cpu" or not source.is_contiguous() or source.is_conj() or source.is_neg():
            if self._stop:
                return False
            target.copy_(source.detach())
            copy.copied_bytes += size
            return True
        into, out_of = target.data_ptr(), source.data_ptr()
        for start in range(0, size, SLICE_BYTES):
            if self._stop:
                return False
            count = min(SLICE_BYTES, size - start)
            ctypes.memmove(into + start, out_of + start, count)  # without the interpreter's lock
            copy.copied_bytes += count
        return True

    def _host(self, info: TensorInfo, source: torch.Tensor) -> torch.Tensor:
        lane = self._lanes.get(source.device)
        return empty_tensor(info) if lane is None else lane.host(source.numel(), source.dtype).view(source.shape)

    def _read(self, copy: _Copy, lane: Lane, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Through the lane. However it ends, no copy is under way afterwards: the update may write what was read."""
        plain = source.is_contiguous() and not (source.is_conj() or source.is_neg())
        parts = list(_slices(target, source)) if plain else [(target, source)]
        under_way: deque[Event] = deque()
        try:
            for into, out_of in parts:
                if self._stop:
                    return False
                lane.read(into, out_of)
                under_way.append(lane.record())
                if len(under_way) > LANE_AHEAD:
                    under_way.popleft().wait()
                copy.copied_bytes += into.numel() * into.element_size()
        finally:
            for event in under_way:
                event.wait()
        return True

    def _sum(self, held: Held) -> None:
        """Checksums of all pieces, so that they need not be made while somebody waits for them. From the end: shadows
        begin at the front, and what is asked for first is summed where it is sent."""
        for number in reversed(range(held.count)):
            if self._closed or self._next is not None:
                return
            held.piece(number)


def _slices(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    into, out_of, most = target.view(-1), source.view(-1), max(1, LANE_BYTES // source.element_size())
    for start in range(0, source.numel(), most):
        yield into[start : start + most], out_of[start : start + most]


def _device_ready(live: LiveState) -> Callable[[], None]:
    """The update may still run on a device: the copy waits there, the training thread does not."""
    devices = {tensor.device for tensor in live.tensors if tensor.device.type == "cuda"}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
