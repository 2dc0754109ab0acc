"""A process that a benchmark starts must not outlive it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """This process is killed when the thread that started it ends (prctl(2)). `parent`: the benchmark's process id,
    since it may have ended before this call."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
