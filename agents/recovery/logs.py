"""The logs of replica processes: kept over restarts, bounded on disk, and their last lines for people.

All lives of a rank append to one file, each under a line that says when it began, so that a crash loop can be read in
one place. At LOG_LIMIT the file becomes log.1, and that log.2; a life that writes more than that is cut while it runs
by copying and truncating (the writer appends, so it goes on at the new end).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LOG_LIMIT = 16 * 1024 * 1024
_KEPT = 2
_TAIL_BYTES = 8192
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


def open_log(path: Path) -> int:
    """A descriptor that appends to `path`, after turning the files if it is full. Raises OSError."""
    if _size(path) > LOG_LIMIT:
        _shift(path)
        os.replace(path, path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def cut(path: Path) -> bool:
    """Keep a running process's log within its bound. True if it was cut (offsets into it are then void)."""
    if _size(path) <= LOG_LIMIT:
        return False
    _shift(path)
    try:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
    except OSError:
        path.with_name(path.name + ".1").unlink(missing_ok=True)  # no room for a copy: the bound goes first
    os.truncate(path, 0)
    return True


def tail(path: Path, offset: int = 0, lines: int = 5, width: int = 300) -> list[str]:
    """The last lines that are not blank, from `offset` on, without control characters. Empty if there are none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = offset if offset <= end else 0
            start = max(begin, end - _TAIL_BYTES)
            file.seek(start)
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    found = [_CONTROL.sub("", line).rstrip() for line in text.splitlines()]
    if start > begin and len(found) > 1:
        found = found[1:]  # begins in the middle
    found = [line if len(line) <= width else line[: width - 3] + "..." for line in found if line.strip()]
    return found[-lines:]


def _shift(path: Path) -> None:
    for number in range(_KEPT - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            os.replace(older, path.with_name(f"{path.name}.{number + 1}"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
