"""Processes, through psutil: what they use and whether they live."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class ProcessReading:
    """`status` is psutil's word (running, sleeping, stopped, zombie)."""

    pid: int
    status: str
    cpu_percent: float
    rss_mb: float


class ProcessReader:
    """Reads processes again and again: CPU use is measured between two readings of the same process."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def read(self, pid: int) -> ProcessReading | None:
        """None if there is no such process (any more) or it is not ours to see."""
        try:
            process = self._known.get(pid)
            if process is None or not process.is_running():
                process = self._known[pid] = psutil.Process(pid)
            with process.oneshot():
                return ProcessReading(
                    pid=pid,
                    status=str(process.status()),
                    cpu_percent=process.cpu_percent(None),
                    rss_mb=process.memory_info().rss / 2**20,
                )
        except psutil.Error:
            self._known.pop(pid, None)
            return None

    def forget_all_but(self, pids: set[int]) -> None:
        for pid in set(self._known) - pids:
            del self._known[pid]
