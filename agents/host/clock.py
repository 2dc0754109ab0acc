"""Clocks that a fault's deadline can be kept by.

The wall clock can be set back, which would extend a fault, and CLOCK_MONOTONIC stands still while the machine sleeps.
CLOCK_BOOTTIME (clock_gettime(2)) never goes back, counts sleep, and means the same to every process until the next
boot, so that a restarted agent and the watchdog can go by it; the boot id says which boot it was.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    def boot_s(self) -> float:
        """Seconds since the machine was started, sleep included."""
        ...

    def wall_s(self) -> float:
        """Unix seconds; for people only."""
        ...

    def boot_id(self) -> str:
        """Changes with every boot."""
        ...


class SystemClock:
    def __init__(self) -> None:
        try:
            self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            self._boot_id = "unknown"

    def boot_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        return self._boot_id
