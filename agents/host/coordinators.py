"""Is a process of this machine the coordinator that says it is? By number, age and command line."""

from __future__ import annotations

import time
from pathlib import Path

from agents.host.errors import HostError
from agents.host.processes import TICKS_PER_S, read_stat
from agents.host.workers import Worker

AGE_SLACK_S = 30.0  # from the process's start to what it calls its own
MARKS = (b"ftar_core.coordinator", b"ftar-coordinator")


def process_of(pid: int, started_unix_s: float) -> Worker:
    """Raises HostError with the reason why it is not here."""
    operation = "find the coordinator"
    stat = read_stat(pid)
    if stat is None or stat.ended:
        raise HostError(operation, 0, f"there is no process {pid} here")
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    began_unix_s = time.time() - now + stat.start_time / TICKS_PER_S
    if not runs_one(pid) or abs(began_unix_s - started_unix_s) > AGE_SLACK_S:
        raise HostError(operation, 0, f"process {pid} here is another one")
    return Worker("coordinator", -1, pid, stat.start_time)


def runs_one(pid: int) -> bool:
    """It has a coordinator's command line. Raises HostError."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError as error:
        raise HostError.of("find the coordinator", error) from None
    return any(mark in command for mark in MARKS)


def unknown() -> Worker:
    """For a process that cannot ask (the watchdog), or an agent without a coordinator."""
    raise HostError("find the coordinator", 0, "no coordinator is known here")
