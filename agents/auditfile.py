"""Lines that are only ever appended to a file, which is bounded. Standard library only, for small processes too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

ROTATE_BYTES = 4 * 2**20


def append(path: Path, line: bytes, rotate_bytes: int = ROTATE_BYTES) -> None:
    """All of the line or nothing; where it would be too long, the file becomes PATH.1 first. Raises OSError."""
    handle = _open(path)
    try:
        size = os.fstat(handle).st_size
        if size and size + len(line) > rotate_bytes:
            os.replace(path, path.with_name(path.name + ".1"))
            os.close(handle)
            handle = _open(path)
            size = 0
        written = os.write(handle, line)
        if written < len(line):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, "no space left for a whole record")
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
