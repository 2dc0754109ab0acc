"""Processes that outlive their starter must be deaf to its terminal from their first instruction on.

An interpreter needs up to seconds before its program can say what a signal means to it; until then SIGINT, SIGHUP and
SIGTERM would end it. A blocked signal waits instead, and the mask is inherited over fork(2) and execve(2) (signal(7)):
the starter blocks them around the start, the program unblocks them when its handlers stand.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

HELD_BACK = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """A process started in here gets these signals only once it calls `let_through`. Of this process, only this thread
    is affected, for as long as it is in here; Python's own handlers run in the main thread as ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """The handlers stand: what waits comes now. Also right in a process that was started otherwise."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
