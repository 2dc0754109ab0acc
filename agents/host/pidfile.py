"""One process a directory: a locked file with its number, for people. The lock ends with the process.

Not at the same moment, though. A killed process of many threads is seen to be dead when its first thread is (its /proc
entry says Z), while the others, which share its open files, may take seconds to end on a busy machine; and a
child that it was just starting has a copy of them until it runs its program. Whoever starts an agent again at once must
not be refused by such remains: as long as the process that wrote its number has ended, or is on its way, the lock is
waited for. One that lives is a refusal at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agents.host.processes import on_its_way_out

# Sixteen threads on two cores took 0.7 s with a load of 20, and once over 3 s with a load of 35. What takes longer than
# this hangs in the kernel.
REMAINS_S = 30.0
_LOOK_S = 0.01


class Taken(Exception):
    """Another process has the lock. `pid`: its number, "?" if it is not written down; `gone`: that one has ended, and
    something of it holds the file yet."""

    def __init__(self, path: Path, pid: str, gone: bool) -> None:
        super().__init__(f"{path} is locked by process {pid}")
        self.path, self.pid, self.gone = path, pid, gone

    def why(self, whose: str) -> str:
        """For people. `whose`: what they call such a process, "agent" or "helper"."""
        if self.gone:
            return f"the {whose} of before (pid {self.pid}) has ended, but its lock is still held: fuser -v {self.path}"
        return f"another {whose} (pid {self.pid}) uses it"


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Makes the directory (mode 0700) if it is not there. Raises OSError, Taken."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = take(path)
    try:
        yield
    finally:
        os.close(handle)


def take(path: Path, ended: Callable[[int], bool] = on_its_way_out) -> int:
    """The open, locked file with our number in it; closing it gives the lock back. `ended` says of a process whether it
    is no more or about to be. Raises OSError, Taken."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(handle, path, ended)
    except BaseException:
        os.close(handle)
        raise
    with contextlib.suppress(OSError):  # a full disk: the lock counts, the number in it is for people
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _lock(handle: int, path: Path, ended: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + REMAINS_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Read anew each time: a third one may have been quicker, and that one lives.
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
        gone = holder.isascii() and holder.isdigit() and ended(int(holder))
        if not gone or time.monotonic() >= deadline:
            raise Taken(path, holder or "?", gone)
        time.sleep(_LOOK_S)
