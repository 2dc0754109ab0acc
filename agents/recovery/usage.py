"""What a process uses of its node."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    cpu_percent: float  # since the look before; 0 at the first
    rss_mb: float
    status: str  # the kernel's word for what it does


class UsageMeter:
    """Of one process at a time."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None

    def read(self, pid: int) -> Usage | None:
        """None: it is gone, or may not be looked at."""
        known = self._process if self._process is not None and self._process.pid == pid else None
        try:
            process = self._process = known or psutil.Process(pid)
            with process.oneshot():
                cpu = process.cpu_percent(None)
                rss_mb = process.memory_info().rss / 1e6
                return Usage(cpu if known is not None else 0.0, rss_mb, str(process.status()))
        except psutil.Error:
            self._process = None
            return None
