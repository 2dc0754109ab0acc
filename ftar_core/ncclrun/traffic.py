"""What travels between two ranks through the plugin's interface: bytes that tell where they belong."""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from dataclasses import dataclass

from ftar_core.ncclabi import Plugin

SIZES = (0, 8, 4097, 65_536, 262_147)  # bytes; one of each a burst and a connection
WINDOW = 8  # requests in flight a connection
GUARD = 64  # bytes behind each receive that must stay as they were
CANARY = 0xEE
TAPE_BYTES = 1 << 21

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Tape:
    """A long string of random bytes, the same in every rank. A message is a piece of it, at a place of its own."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(random.Random(9).randbytes(TAPE_BYTES), TAPE_BYTES)
        self._at = ctypes.addressof(self._bytes)

    def place(self, stream: int, message: int) -> int:
        """The address of a message's bytes; sent from there, for nobody writes to the tape."""
        return self._at + (stream * 40_961 + message * 4_093) % (TAPE_BYTES - max(SIZES))  # primes

    def wrong(self, address: int, stream: int, message: int, size: int) -> int:
        """How many bytes at `address` are not the message's."""
        right = self.place(stream, message)
        if _libc.memcmp(address, right, size) == 0:
            return 0
        return sum(a != b for a, b in zip(ctypes.string_at(address, size), ctypes.string_at(right, size), strict=True))


def size_of(stream: int, message: int) -> int:
    return SIZES[(message * 7 + stream) % len(SIZES)]


@dataclass
class Counts:
    """What a rank did. `longest_ms`: the longest time from posting a message until its receiver had all of it."""

    rounds: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_checked: int = 0
    bytes_checked: int = 0
    bytes_wrong: int = 0
    longest_ms: float = 0.0
    first_wrong: str = ""


class Outgoing:
    """One connection's sends: `owed` messages are still to be posted."""

    def __init__(self, plugin: Plugin, comm: int, stream: int, tape: Tape, counts: Counts) -> None:
        self.plugin, self.comm, self.stream, self.tape, self.counts = plugin, comm, stream, tape, counts
        self.owed = self.posted = 0
        self.flying: deque[tuple[int, int, float]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.owed or self.flying)

    def pump(self, now: float) -> bool:
        moved = False
        while self.owed and len(self.flying) < WINDOW:
            size = size_of(self.stream, self.posted)
            request = self.plugin.isend(self.comm, self.tape.place(self.stream, self.posted), size)
            if not request:
                break
            self.flying.append((request, size, now))
            self.owed -= 1
            self.posted += 1
            moved = True
        while self.flying and self.plugin.test(self.flying[0][0]) is not None:
            _, size, since = self.flying.popleft()
            self.counts.messages_sent += 1
            self.counts.bytes_sent += size
            self.counts.longest_ms = max(self.counts.longest_ms, 1000 * (time.monotonic() - since))
            moved = True
        return moved


class Incoming:
    """One connection's receives, always WINDOW of them posted."""

    def __init__(self, plugin: Plugin, comm: int, stream: int, tape: Tape, counts: Counts) -> None:
        self.plugin, self.comm, self.stream, self.tape, self.counts = plugin, comm, stream, tape, counts
        self.room = max(SIZES) + GUARD
        self.memory = ctypes.create_string_buffer(bytes([CANARY]) * (self.room * WINDOW), self.room * WINDOW)
        self.clean = bytes([CANARY]) * GUARD
        self.posted = self.done = 0
        self.flying: deque[int] = deque()

    def _buffer(self, message: int) -> int:
        return ctypes.addressof(self.memory) + message % WINDOW * self.room

    def pump(self) -> bool:
        moved = False
        while len(self.flying) < WINDOW:
            buffer = self._buffer(self.posted)
            if self.posted >= WINDOW:  # it was cleared when its last message was checked: a late byte would show
                used = size_of(self.stream, self.posted - WINDOW)
                self._look_clean(buffer, min(used + GUARD, self.room), self.posted - WINDOW, "after")
            request = self.plugin.irecv(self.comm, buffer, max(SIZES))
            if not request:
                break
            self.flying.append(request)
            self.posted += 1
        while self.flying and (size := self.plugin.test(self.flying[0])) is not None:
            self.flying.popleft()
            self._check(self.done, size)
            self.done += 1
            moved = True
        return moved

    def _check(self, message: int, size: int) -> None:
        buffer, wanted = self._buffer(message), size_of(self.stream, message)
        wrong = abs(size - wanted) + self.tape.wrong(buffer, self.stream, message, min(size, wanted))
        if wrong:
            self._complain(wrong, f"message {message} of stream {self.stream} ({size} bytes of {wanted})")
        self._look_clean(buffer + size, GUARD, message, "behind")
        ctypes.memset(buffer, CANARY, size)
        self.counts.messages_checked += 1
        self.counts.bytes_checked += size

    def _look_clean(self, address: int, size: int, message: int, where: str) -> None:
        found = ctypes.string_at(address, size)
        if found.count(CANARY) != size:
            self._complain(size - found.count(CANARY), f"{where} message {message} of stream {self.stream}")

    def _complain(self, wrong: int, where: str) -> None:
        self.counts.bytes_wrong += wrong
        self.counts.first_wrong = self.counts.first_wrong or where
