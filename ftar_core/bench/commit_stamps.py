"""When a leader of `bench commit` had handed an order to all its ranks: a file that it and the benchmark map.

For ranks that are connected by Unix sockets: the kernel notes no arrival there as it does for TCP (socket(7),
SO_TIMESTAMPNS), but a message lies in the receiver's buffer when send(2) returns. So the leader's clock tells, read
when the last send has returned: a little late, never early.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

SLOTS = 64  # orders that are told apart: the benchmark looks at each before the next


class Stamps:
    """CLOCK_REALTIME seconds by replica and by the number of the order: a commit's step, an epoch's number."""

    def __init__(self, path: Path, replicas: int, *, new: bool = False) -> None:
        self._replicas = replicas
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if new else 0), 0o600)
        try:
            if new:
                os.ftruncate(file, 8 * 2 * SLOTS * replicas)
            self._map = mmap.mmap(file, 8 * 2 * SLOTS * replicas)
        finally:
            os.close(file)
        self._times = memoryview(self._map).cast("d")

    def committed(self, replica: int, step: int, at: float) -> None:
        self._times[2 * SLOTS * replica + step % SLOTS] = at

    def entered(self, replica: int, epoch: int, at: float) -> None:
        self._times[2 * SLOTS * replica + SLOTS + epoch % SLOTS] = at

    def last_commit(self, step: int) -> float:
        """Of the replica that was last; one that did not have this order stands with an older one, or with 0."""
        return max(self._times[step % SLOTS :: 2 * SLOTS].tolist())

    def last_epoch(self, epoch: int) -> float:
        return max(self._times[SLOTS + epoch % SLOTS :: 2 * SLOTS].tolist())

    def close(self) -> None:
        self._times.release()
        self._map.close()
