"""Finds and ends the processes of a lab: those that carry its uuid in their environment, and no others.

Why the environment: it is set once for the keeper, inherited by everything the lab ever starts, cannot be lost by a
daemon that goes its own way, and is readable in /proc/PID/environ after every crash. Process groups, sessions and pid
files are not: agents and replicas start sessions of their own, and a file can be missing in a half-built lab.
A process is held by pidfd before it is looked at, so that a signal can never hit a later owner of its number.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ftctl.lab.manifest import MARKER

POLL_S = 0.02


@dataclass(frozen=True)
class Found:
    pid: int
    argv: str


def processes_of(uuid: str) -> list[Found]:
    """Living processes with the marker, this one apart."""
    return [Found(pid, _argv(pid)) for pid in _pids() if carries(pid, uuid)]


def living(uuids: Iterable[str]) -> set[str]:
    """Those of `uuids` that have a living process."""
    wanted = {f"{MARKER}={uuid}".encode(): uuid for uuid in uuids}
    alive: set[str] = set()
    for pid in _pids() if wanted else ():
        alive.update(wanted[entry] for entry in _environment(pid) if entry in wanted)
    return alive


# Nothing survives SIGKILL, but dying needs a processor: with 35 runnable processes on 2 cores 12 s were too short.
DEAD_WITHIN_S = 60.0


def end_all(uuid: str, grace_s: float, deadline_s: float = DEAD_WITHIN_S) -> list[Found]:
    """SIGTERM, after `grace_s` SIGKILL, until none is left; returns what is left after `deadline_s` more.

    Looks again after every round: a process may have been forking while it was asked to end.
    """
    start = time.monotonic()
    asked: set[int] = set()
    while True:
        left = processes_of(uuid)
        waited = time.monotonic() - start
        if not left or waited > grace_s + deadline_s:
            _reap(asked)
            return left
        for found in left:
            if waited >= grace_s:
                _signal(found.pid, uuid, signal.SIGKILL)
            elif found.pid not in asked:
                _signal(found.pid, uuid, signal.SIGTERM)
            asked.add(found.pid)
        _reap(asked)
        time.sleep(POLL_S)


def _signal(pid: int, uuid: str, number: signal.Signals) -> None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if carries(pid, uuid):  # checked again, now that the number cannot change hands
            signal.pidfd_send_signal(fd, number)
    except OSError:
        return
    finally:
        os.close(fd)


def _reap(pids: Iterable[int]) -> None:
    """Children of this very process would stay as zombies otherwise."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except OSError:
            continue


def _pids() -> list[int]:
    me = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != me]


def carries(pid: int, uuid: str) -> bool:
    """True if this process lives and has the marker."""
    return f"{MARKER}={uuid}".encode() in _environment(pid)


def _environment(pid: int) -> list[bytes]:
    """Empty for zombies, kernel threads and other users' processes."""
    path = Path(f"/proc/{pid}/environ")
    try:
        if os.geteuid() not in (0, path.stat().st_uid):
            return []
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


def _argv(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
