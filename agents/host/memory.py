"""Memory of the machine, and processes that hold some of it (hog.py), found again by a token in their command line."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from agents.host.errors import HostError
from agents.host.hog import available_mb as available_mb  # noqa: PLC0414 - part of this module
from agents.host.processes import Handle, read_stat, send_to, wait_ended

HOG = Path(__file__).with_name("hog.py")
READY_WITHIN_S = 12.0
PAGE = os.sysconf("SC_PAGE_SIZE")
KILL = 9


def hold(token: str, mb: int, leave_mb: int) -> None:
    """Start a process that holds so much; returns when it does. Raises HostError."""
    operation = f"hold {mb} MB of memory"
    argv = [sys.executable, "-I", "-S", str(HOG), token, str(mb), str(leave_mb)]
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
        )
    except OSError as error:
        raise HostError.of(operation, error) from None
    line = ""
    if child.stdout is not None:
        with child.stdout as said:
            ready, _, _ = select.select([said], [], [], READY_WITHIN_S)
            line = said.readline().decode("utf-8", "replace").strip() if ready else ""
    if line != str(mb):
        raise HostError(operation, 0, line or "the process that was to hold it did not get so far")


def holders(token: str) -> list[tuple[int, int, int]]:
    """Processes with that token: (pid, start time, MB they hold)."""
    found = []
    mark = b"\0" + token.encode() + b"\0"
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            if mark not in command or b"hog.py" not in command:
                continue
            resident = int(Path(f"/proc/{entry}/statm").read_bytes().split()[1]) * PAGE >> 20
        except (OSError, IndexError, ValueError):
            continue
        stat = read_stat(int(entry))
        if stat is not None and not stat.ended:
            found.append((stat.pid, stat.start_time, resident))
    return found


def release(token: str) -> int:
    """End them, and say how many there were. Raises HostError."""
    found = holders(token)
    for pid, start_time, _mb in found:
        handle = Handle.open(pid, start_time)
        if handle is None:
            continue
        handle.close()
        send_to(pid, start_time, KILL)
        wait_ended(pid, start_time, 2.0)
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass  # another process started it
    return len(found)
