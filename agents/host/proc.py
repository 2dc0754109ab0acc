"""Processes, through psutil: what they use, whether they live, and who they really are (a pid alone is reused)."""

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


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot (proc_pid_stat(5), field 22); with the pid it is unique."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_same(pid: int, ticks: int | None) -> bool:
    return ticks is not None and start_ticks(pid) == ticks
