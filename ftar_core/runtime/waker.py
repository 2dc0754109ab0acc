"""Waking a selector loop from another thread or a signal handler (the self-pipe trick)."""

from __future__ import annotations

import os
import threading


class Waker:
    """Makes a descriptor readable from another thread. The lock keeps a late wake-up from writing to a descriptor that
    was closed and given to somebody else."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt a wake-up
        self._closed = False

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                try:
                    os.write(self._write, b"!")
                except BlockingIOError:
                    pass  # full: it will wake up anyway

    def drain(self, _mask: int) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)
