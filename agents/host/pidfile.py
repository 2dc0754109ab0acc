"""One process a directory: a locked file with its number, for people. The lock ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Taken(Exception):
    """Another process has the lock; the message is its number, "?" if it is not written down."""


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Makes the directory (mode 0700) if it is not there. Raises OSError, Taken."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(os.read(handle, 32).decode("ascii", "replace").strip() or "?") from None
        try:
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        except OSError:
            pass  # a full disk: the lock counts, the number in it is for people
        yield
    finally:
        os.close(handle)
