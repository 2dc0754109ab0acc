"""Gradients on their way between a device and host memory, without a wait in the thread that computes.

Backward's hooks only put copies into the lane of their device. When a bucket's last copy is queued, an event is
recorded behind it, and a thread of its own waits for that event and announces the bucket: the ring reads it from then
on, while backward goes on and later buckets are being copied. The unit of the pipeline is the bucket, its copies are as
large as its parameters. A new epoch concerns announced buckets only, so it neither waits for a copy nor ends one.

Digests, norms and the look for infinity are made of the host's copy, which is there in any case: that takes no kernel
from the training, and is the same code on every device.

On the way back the device waits for the copies (`Lane.join`), not the host; the result buffers are written again only
behind them (`results_free`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from ftar_core.errors import FtarError
from ftar_core.training.devices import Event, Lane


class Staging:
    """Of one model. `announce(bucket)` is called in its thread, in the order of `full`. All but that: any thread."""

    def __init__(self, lanes: dict[torch.device, Lane], announce: Callable[[int], None]) -> None:
        self.lanes = lanes
        self._announce = announce
        self._changed = threading.Condition()
        self._alive: dict[int, list[object]] = {}  # bucket -> what its copies read
        self._full: deque[tuple[int, list[Event]]] = deque()
        self._busy = self._closed = False
        self._turn = 0  # rises when what was announced for a step is void
        self._returning: list[Event] = []  # copies of results to the device
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None

    def lane(self, tensor: torch.Tensor) -> Lane | None:
        return self.lanes.get(tensor.device)

    def fetch(self, bucket: int, target: torch.Tensor, source: torch.Tensor, weight: float) -> None:
        """Part of `bucket`: before its `full`."""
        alive = self.lanes[source.device].fetch(target, source, weight)
        with self._changed:
            self._alive.setdefault(bucket, []).append(alive)

    def clear(self, bucket: int, target: torch.Tensor) -> None:
        """As `fetch`, of zeros, into a part of the bucket that lies on a device."""
        self.lanes[target.device].clear(target)
        with self._changed:
            self._alive.setdefault(bucket, [])

    def full(self, bucket: int) -> None:
        """Nothing more is fetched for it: to be announced when its copies are made."""
        events = [lane.record() for lane in self.lanes.values()]
        with self._changed:
            self._full.append((bucket, events))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftar-staging", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when all that is full is announced. Raises FtarError if the device failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._closed or not (self._full or self._busy))
            if self._failed is not None:
                raise FtarError(
                    f"gradients did not come from the device: {self._failed}",
                    hint="a fault of the device ends its replica; the others go on. See: ftctl status",
                ) from self._failed

    def drop(self) -> None:
        """A new step: what was not announced yet never will be, and no copy into a buffer is under way any more."""
        with self._changed:
            self._turn += 1
            self._full.clear()
            stray = bool(self._alive)
        if stray:  # a step that was left in its middle
            for event in [lane.record() for lane in self.lanes.values()]:
                event.wait()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._busy)
            self._alive.clear()

    def bring(self, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """On the device of `like`; usable after `brought`."""
        return self.lanes[like.device].bring(source, like)

    def brought(self) -> None:
        """What the calling thread computes from here on sees what was brought."""
        for lane in self.lanes.values():
            event = lane.record()
            lane.join(event)
            with self._changed:
                self._returning.append(event)

    def used(self) -> None:
        """What the calling thread has put on the device so far may read results where they are."""
        events = [lane.used() for lane in self.lanes.values()]
        with self._changed:
            self._returning += events

    def results_free(self) -> None:
        """Returns when no copy reads the result buffers: they may be written."""
        with self._changed:
            returning, self._returning = self._returning, []
        for event in returning:
            event.wait()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._full.clear()
            self._changed.notify_all()

    # --- the thread of the staging

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._full)
                if self._closed:
                    return
                (bucket, events), self._busy = self._full.popleft(), True
                turn = self._turn
            try:
                self.results_free()  # the ring writes them once the bucket is announced
                for event in events:
                    event.wait()
                with self._changed:
                    self._alive.pop(bucket, None)
                    current = turn == self._turn
                if current:
                    self._announce(bucket)
            except Exception as error:  # noqa: BLE001 - for the training thread, which ends the replica
                with self._changed:
                    self._failed = error
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
