"""One process at a time makes or removes the lab of a name: flock(2) on a file beside the lab's directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftctl.lab.paths import LabPaths


class LabBusy(Exception):
    """Another process is just making or removing this lab."""


@contextmanager
def locked(paths: LabPaths) -> Iterator[None]:
    """Hold the lock; the file goes when this is over, also if its maker was killed. Raises LabBusy, OSError."""
    path = paths.root.parent / f".{paths.root.name}.lock"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise LabBusy from None
        if _same_file(path, fd):
            break
        os.close(fd)  # removed by its last holder between the two calls
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _same_file(path: Path, fd: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False
