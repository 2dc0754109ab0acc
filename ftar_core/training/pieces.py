"""A state as a row of bytes, and which pieces of it have arrived: the books of a fetch from several sources. Pure.

All tensors lie one behind the other, in the order of their infos, without gaps; the row is cut into pieces of equal
size. Sources that hold the state after the same step hold the same row, bit for bit, so any of them can give any piece.
Whoever is ready takes the next one: a fast source gives more of them, and when a source is lost only what was asked of
it and had not come goes back.

Every piece is checked by a 64-bit checksum as it arrives, and the whole by a digest over the checksums of all pieces,
which every source makes of its own copy: two sources whose states differ anywhere are found out, even if no byte was
damaged on the way.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

PIECE_BYTES = 1024 * 1024
MAX_BYTES = 1 << 44  # of one rank's state
WINDOW_S = 0.25  # of pieces asked ahead of one source: what a slow one is asked for must not hold up the end
LEAST_AHEAD, MOST_AHEAD = 2, 16


class Layout:
    """Where each tensor lies in the row. `sizes` in bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(sizes)]
        self.total = self._starts[-1]

    def buffers(self, memories: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
        """Bytes [start, end) of the row, as slices of the tensors' memories (in that order, sizes as given)."""
        found: list[memoryview] = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            low = start - self._starts[index]
            high = min(end, self._starts[index + 1]) - self._starts[index]
            if high > low:
                found.append(memories[index][low:high])
                start += high - low
            index += 1
        return found


def pieces_of(total: int, size: int = PIECE_BYTES) -> int:
    return -(-total // size)


def whole_digest(sums: Sequence[int]) -> bytes:
    """SHA-256 over the checksums of all pieces, in order."""
    return hashlib.sha256(struct.pack(f"<{len(sums)}Q", *sums)).digest()


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of the row."""

    number: int
    start: int
    end: int


class PieceBook:
    """Which pieces are missing, which are on their way from whom, which are here. The caller holds its lock."""

    def __init__(self, total: int, size: int = PIECE_BYTES) -> None:
        self.total, self._size = total, size
        count = pieces_of(total, size)
        self._missing = deque(range(count))
        self._asked: dict[int, str] = {}
        self._sums: list[int | None] = [None] * count
        self._left = count
        self.arrived_bytes = 0
        self.by_source: dict[str, int] = {}  # verified bytes
        self.damaged = 0  # pieces that came with another checksum, and were asked for again

    @property
    def complete(self) -> bool:
        return self._left == 0

    def take(self, source: str) -> Piece | None:
        """The next piece to ask `source` for; None: all others are here or on their way."""
        if not self._missing:
            return None
        number = self._missing.popleft()
        self._asked[number] = source
        return self._piece(number)

    def piece(self, number: int, source: str) -> Piece | None:
        """The piece, if it is on its way from there."""
        return self._piece(number) if self._asked.get(number) == source else None

    def _piece(self, number: int) -> Piece:
        start = number * self._size
        return Piece(number, start, min(self.total, start + self._size))

    def verified(self, number: int, source: str, checksum: int) -> None:
        del self._asked[number]
        piece = self._piece(number)
        self._sums[number] = checksum
        self._left -= 1
        self.arrived_bytes += piece.end - piece.start
        self.by_source[source] = self.by_source.get(source, 0) + piece.end - piece.start

    def spoiled(self, number: int) -> None:
        """It came damaged: to be asked for again, of whoever is next."""
        del self._asked[number]
        self.damaged += 1
        self._missing.appendleft(number)

    def lost(self, source: str) -> int:
        """The connection to `source` is gone: what was on its way goes back. Returns how many pieces."""
        back = sorted((number for number, who in self._asked.items() if who == source), reverse=True)
        for number in back:
            del self._asked[number]
            self._missing.appendleft(number)
        return len(back)

    def digest(self) -> bytes:
        """Of the whole; only when complete."""
        return whole_digest([checksum for checksum in self._sums if checksum is not None])


def ahead(bytes_per_s: float, size: int = PIECE_BYTES) -> int:
    """How many pieces to ask of a source ahead, by what it has given so far (0: not known yet)."""
    return max(LEAST_AHEAD, min(MOST_AHEAD, int(bytes_per_s * WINDOW_S / size)))
