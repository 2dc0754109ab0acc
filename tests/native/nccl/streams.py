"""Traffic whose every byte is known: a byte's value depends on the connection, the message and its place in it, so that
a lost, doubled, moved or late byte shows. Buffers are reused at once, as NCCL reuses them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import numpy as np

from .abi import Plugin, PluginError

MEGA = 1 << 20
MAX_BYTES = 64 * MEGA
_GUARD = 64
_CANARY = 0xEE
_IDLE_S, _IDLE_MOST_S = 0.0001, 0.002
_base: list[np.ndarray] = []


def pattern(stream: int, message: int, size: int) -> np.ndarray:
    """The bytes of a message: a piece of one random tape, begun at a place of its own (4,093 and 40,961 are prime)."""
    if not _base:
        _base.append(np.random.default_rng(9).integers(0, 256, 17 * MEGA, dtype=np.uint8))
    start = (stream * 40_961 + message * 4_093) % MEGA
    if size > 16 * MEGA:
        return np.resize(_base[0][start : start + 16 * MEGA], size)
    return _base[0][start : start + size]


def size_of(sizes: list[int], stream: int, message: int) -> int:
    return sizes[(message * 7 + stream) % len(sizes)]


class Stream(threading.Thread):
    """Sends or receives messages on one connection until `count` is reached, an error comes or it is stopped."""

    def __init__(
        self, plugin: Plugin, comm: int, stream: int, sizes: list[int], count: int, window: int, pause_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self.plugin, self.comm, self.stream = plugin, comm, stream
        self.sizes, self.count, self.window = sizes, count, window
        self.done, self.bytes, self.code, self.error = 0, 0, 0, ""
        self.longest_s, self.last = 0.0, time.monotonic()
        self.stop = self.abandon = False  # abandon: leave even with sends in flight
        self.pause_s = pause_s  # a sender's, after each message that it posts
        self._idle_s = _IDLE_S
        self.buffers: list[np.ndarray] = []  # they must live until the connection is closed

    def run(self) -> None:
        try:
            self.work()
        except PluginError as error:
            self.code, self.error = error.code, str(error)
        except Exception as error:
            self.code, self.error = -1, repr(error)

    def finished_one(self, size: int) -> None:
        now = time.monotonic()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        self.done += 1
        self.bytes += size

    def rest(self, idle: bool) -> None:
        """Nothing to do: look again soon, less soon each time, so that many streams leave the cores to the plugin."""
        if idle:
            time.sleep(self._idle_s)
        self._idle_s = min(2 * self._idle_s, _IDLE_MOST_S) if idle else _IDLE_S

    def work(self) -> None:
        raise NotImplementedError


class Sender(Stream):
    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.flying: deque[tuple[int, int]] = deque()  # requests that are not done, with their sizes

    def work(self) -> None:
        largest = max(self.sizes)
        self.buffers = buffers = [np.empty(largest + 1, np.uint8) for _ in range(self.window)]
        memory = [self.plugin.register(self.comm, b.ctypes.data, b.size) for b in buffers]
        flying = self.flying
        posted = 0
        while self.done < self.count and not self.abandon and not (self.stop and not flying):
            idle = True
            if posted < self.count and not self.stop and len(flying) < self.window:
                size = size_of(self.sizes, self.stream, posted)
                buffer = buffers[posted % self.window]
                buffer[:size] = pattern(self.stream, posted, size)
                if request := self.plugin.isend(self.comm, buffer.ctypes.data, size, memory[posted % self.window]):
                    flying.append((request, size))
                    posted += 1
                    idle = False
                    if self.pause_s:
                        time.sleep(self.pause_s)
            if flying and (size_done := self.plugin.test(flying[0][0])) is not None:
                _, size = flying.popleft()
                assert size_done == size, (size_done, size)
                buffers[self.done % self.window][:size] = _CANARY  # NCCL writes the next chunk here
                self.finished_one(size)
                idle = False
            self.rest(idle)
        for m in memory:  # with requests in flight too, if it was abandoned
            self.plugin.deregister(self.comm, m)


class Receiver(Stream):
    """Its receives are larger than what comes, and what lies behind a message must stay as it was."""

    def work(self) -> None:
        largest = max(self.sizes)
        room = largest + _GUARD
        self.buffers = buffers = [np.full(room, _CANARY, np.uint8) for _ in range(self.window)]
        memory = [self.plugin.register(self.comm, b.ctypes.data, b.size) for b in buffers]
        flying: deque[int] = deque()
        posted = 0
        while self.done < self.count and not self.stop:
            idle = True
            if posted < self.count and len(flying) < self.window:
                buffer = buffers[posted % self.window]
                used = size_of(self.sizes, self.stream, posted - self.window) if posted >= self.window else 0
                # It was cleared when its last message was checked: a late byte would show here.
                if not (buffer[: used + _GUARD] == _CANARY).all():
                    raise AssertionError(
                        f"stream {self.stream}: a byte came late into the buffer of message {posted - self.window}"
                    )
                if request := self.plugin.irecv(
                    self.comm, buffer.ctypes.data, largest + 1, memory[posted % self.window]
                ):
                    flying.append(request)
                    posted += 1
                    idle = False
            if flying and (size_done := self.plugin.test(flying[0])) is not None:
                flying.popleft()
                size = size_of(self.sizes, self.stream, self.done)
                buffer = buffers[self.done % self.window]
                if size_done != size:
                    raise AssertionError(f"stream {self.stream}: message {self.done} has {size_done} bytes, not {size}")
                if not np.array_equal(buffer[:size], pattern(self.stream, self.done, size)):
                    wrong = int((buffer[:size] != pattern(self.stream, self.done, size)).argmax())
                    raise AssertionError(
                        f"stream {self.stream}: message {self.done} is wrong from byte {wrong} of {size}"
                    )
                if not (buffer[size : size + _GUARD] == _CANARY).all():
                    raise AssertionError(f"stream {self.stream}: bytes behind message {self.done}")
                buffer[:size] = _CANARY
                self.finished_one(size)
                idle = False
            self.rest(idle)
        for m in memory:
            self.plugin.deregister(self.comm, m)

    def untouched(self) -> bool:
        """When the sender has stopped and all its messages were received: nothing may have come since."""
        return all(bool((buffer == _CANARY).all()) for buffer in self.buffers)
