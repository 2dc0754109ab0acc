"""A few numbers that a benchmark and the replicas of its job share, in a file that all of them map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

NO_LIMIT = 1 << 62
LIMIT, PAUSE_MS, FIRST = 0, 1, 2  # places of the 64-bit numbers


class Board:
    """`limit`: replicas begin no step above it. `pause_ms`: a step takes at least so long. Of each replica the step it
    works on, and the process that has come to its loop."""

    def __init__(self, path: Path, replicas: Sequence[str], *, new: bool = False) -> None:
        self._places = {name: FIRST + 2 * i for i, name in enumerate(replicas)}
        size = 8 * (FIRST + 2 * len(replicas))
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if new else 0), 0o600)
        try:
            if new:
                os.ftruncate(file, size)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._numbers = memoryview(self._map).cast("q")  # one number is written at once
        if new:
            self.limit = NO_LIMIT

    @property
    def limit(self) -> int:
        return self._numbers[LIMIT]

    @limit.setter
    def limit(self, step: int) -> None:
        self._numbers[LIMIT] = step

    @property
    def pause_ms(self) -> int:
        return self._numbers[PAUSE_MS]

    @pause_ms.setter
    def pause_ms(self, value: int) -> None:
        self._numbers[PAUSE_MS] = value

    def works_on(self, replica: str, step: int) -> None:
        self._numbers[self._places[replica]] = step

    def step(self, replica: str) -> int:
        """0: none yet."""
        return self._numbers[self._places[replica]]

    def furthest(self) -> int:
        return max(self.step(name) for name in self._places)

    def arrived(self, replica: str, pid: int) -> None:
        self._numbers[self._places[replica] + 1] = pid

    def has_arrived(self, replica: str, pid: int) -> bool:
        return self._numbers[self._places[replica] + 1] == pid

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
