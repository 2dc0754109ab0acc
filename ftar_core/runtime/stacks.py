"""The Python stacks of this process, for the agent of its node to read: also while the GIL is held, or the main thread
sits in C.

faulthandler's handler of a signal is C: it walks the frames of all threads and writes them to a descriptor, with no
help from the interpreter. Here the descriptor is a file in memory that the agent opens through /proc/PID/fd: nothing is
left on a disk and a full one does no harm. The signal is a real-time one, and the agent sends it to a thread that does
nothing but wait, since a signal ends a sleep: a thread that hangs is looked at, not woken up.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import signal
import threading

from ftar_core.wire.agentlink import MEMORY_FILE, StackWay

log = logging.getLogger("ftar.session")
SIGNAL = signal.SIGRTMIN + 7  # the first ones are used by libraries


class StackWriter:
    """One a process. `way` is None where the kernel or Python has no means for it."""

    def __init__(self) -> None:
        self.way: StackWay | None = None
        self._file = -1
        self._sleep, self._wake = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._wait, name="ftar-stacks", daemon=True)

    def start(self) -> None:
        if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            log.info("signal %d is used by something else: no Python stacks for ftctl dump", SIGNAL)
            return
        try:
            self._file = os.memfd_create(MEMORY_FILE, os.MFD_CLOEXEC)
            fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # whoever empties it starts at its begin again
            faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            log.info("no Python stacks for ftctl dump: %s", error)
            return
        self._thread.start()
        self.way = StackWay(signal=int(SIGNAL), thread=self._thread.native_id or 0, file=self._file)

    def close(self) -> None:
        """Idempotent."""
        if self.way is not None:
            self.way = None
            faulthandler.unregister(SIGNAL)
            os.write(self._wake, b"x")
            self._thread.join(1.0)
            os.close(self._file)
        for descriptor in (self._sleep, self._wake):
            if descriptor >= 0:
                os.close(descriptor)
        self._sleep = self._wake = -1

    def _wait(self) -> None:
        os.read(self._sleep, 1)
