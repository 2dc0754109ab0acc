"""Who a checkpoint directory belongs to: a lock that the kernel gives back when its holder dies, however it dies.

All replicas of a job hold the lock of its directory together (shared), and its file says which job that is. Another job
may take the directory over when nobody holds it any more; so neither a crash nor a clock that jumps leaves it locked,
and two jobs cannot remove each other's checkpoints. Where a file system knows no flock(2), that is said once, and the
directory is not protected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from ftar_core.errors import CheckpointError
from ftar_core.runtime.forks import close_in_children

log = logging.getLogger("ftar.checkpoint")
PATIENCE_S = 2.0
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Flock:
    """An open file with a lock on it. Not kept by forked children."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        close_in_children(self)

    def fileno(self) -> int:
        return self._descriptor

    def take(self, *, shared: bool) -> bool:
        """False if somebody else has it. Raises OSError where there are no locks."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def read(self) -> str:
        return os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()

    def write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode() + b"\n", 0)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def hold(directory: Path, owner: str) -> Flock | None:
    """The lock of a directory, kept until it is closed; None where there are no locks. Raises CheckpointError if
    another job holds it, OSError."""
    lock = Flock(directory / "lock")
    try:
        by = time.monotonic() + PATIENCE_S
        while not _enter(lock, owner):
            if time.monotonic() > by:
                raise CheckpointError(
                    f"the checkpoint directory {directory} is in use by {lock.read() or 'another job'}",
                    hint="give each job a directory of its own",
                )
            time.sleep(0.05)
    except OSError as error:
        lock.close()
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s is on a file system without locks: nothing keeps a second job out of it", directory)
        return None
    except CheckpointError:
        lock.close()
        raise
    return lock


def _enter(lock: Flock, owner: str) -> bool:
    """Alone: the directory is ours from now on. With others: if it is ours already. (Whoever has just become its owner
    may be about to say so: the caller tries for a moment.)"""
    if lock.take(shared=False):
        lock.write(owner)
        lock.take(shared=True)
        return True
    return lock.read() == owner and lock.take(shared=True) and lock.read() == owner


def alone(path: Path) -> Flock | None:
    """The lock of a checkpoint that is being written; None if its writer lives. Raises OSError."""
    lock = Flock(path)
    try:
        if lock.take(shared=False):
            return lock
    except OSError as error:
        if error.errno in NO_LOCKS:
            return lock
        lock.close()
        raise
    lock.close()
    return None
