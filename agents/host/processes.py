"""Processes by identity, not by number.

A pid is used again after its process is gone; a signal sent to a remembered pid may hit a stranger. A process is
therefore named by (pid, start time): the start time is field 22 of /proc/PID/stat (proc_pid_stat(5), clock ticks since
boot) and no two processes of one boot share both. Signals go through a pidfd (pidfd_open(2)), opened first and checked
afterwards, so that there is no moment between looking and killing. Where the kernel or a sandbox has no pidfds the
check is repeated just before kill(2), which leaves a window of microseconds in place of none.

A zombie counts as ended: it runs nothing any more, and only its parent can do something about it. (What its other
threads share, such as open files, may be held for a moment yet: pidfile.py.)
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agents.host.errors import HostError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_PF_EXITING = 0x4  # include/linux/sched.h


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says. `start_time` in ticks since boot."""

    pid: int
    state: str
    parent: int
    session: int
    start_time: int

    @property
    def ended(self) -> bool:
        return self.state in "ZX"


def read_stat(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The second field is the name in brackets and may itself hold spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def on_its_way_out(pid: int) -> bool:
    """There is no such process, or it has ended, or nothing can keep it from ending: flags and pending signals of
    /proc/PID/stat (fields 9 and 31)."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return True
    fields = text[text.rindex(b")") + 2 :].split()
    exiting = bool(int(fields[6]) & _PF_EXITING)
    return fields[0] in (b"Z", b"X") or exiting or bool(int(fields[28]) & (1 << (signal.SIGKILL - 1)))


def start_time_of(pid: int) -> int | None:
    stat = read_stat(pid)
    return None if stat is None else stat.start_time


def boot_s() -> float:
    """Seconds since boot, on the clock of start times."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Handle:
    """A process that was alive, with this identity, when the handle was opened."""

    def __init__(self, pid: int, start_time: int, fd: int | None) -> None:
        self.pid = pid
        self.start_time = start_time
        self.fd = fd  # a pidfd: readable once the process ended; None where there are no pidfds

    @classmethod
    def open(cls, pid: int, start_time: int) -> Handle | None:
        """None if that process has ended (or its number belongs to another by now)."""
        fd: int | None = None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except (OSError, AttributeError):
            fd = None
        handle = cls(pid, start_time, fd)
        stat = read_stat(pid)
        if stat is None or stat.start_time != start_time or stat.ended:
            handle.close()
            return None
        return handle

    def ended(self) -> bool:
        if self.fd is not None:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        stat = read_stat(self.pid)
        return stat is None or stat.start_time != self.start_time or stat.ended

    def send(self, number: int) -> bool:
        """False if the process has ended. Raises PermissionError."""
        try:
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, number)
            elif self.ended():
                return False
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def kill_session(leader: int, leader_start: int, *, ended_s: float | None = None) -> list[int]:
    """SIGKILL to the members of the session that process (leader, leader_start) began, itself included if it lives.

    Session ids are pids and are used again as well. Members are therefore looked up while the leader's number is still
    taken, by itself or as a zombie; when it is gone, only processes older than its end (`ended_s`, seconds since boot)
    are counted as its own. Returns the pids that were sent the signal.
    """
    stat = read_stat(leader)
    if stat is not None and stat.start_time != leader_start:
        return []  # the number has gone to a stranger, so the session is empty
    newest = None if stat is not None or ended_s is None else int(ended_s * TICKS_PER_S) + 1
    killed: list[int] = []
    for member in _session(leader):
        if member.start_time < leader_start or (newest is not None and member.start_time > newest):
            continue
        handle = Handle.open(member.pid, member.start_time)
        if handle is None:
            continue
        try:
            again = read_stat(member.pid)
            if again is not None and again.session == leader and handle.send(signal.SIGKILL):
                killed.append(member.pid)
        except PermissionError:
            pass  # it changed its user id; nothing more can be done from here
        finally:
            handle.close()
    return killed


def _session(leader: int) -> Iterator[Stat]:
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            stat = read_stat(int(entry))
            if stat is not None and stat.session == leader and not stat.ended:
                yield stat


def send_to(pid: int, start_time: int, number: int) -> bool:
    """A signal to that process and to no other of its number. False if it has ended. Raises HostError."""
    handle = Handle.open(pid, start_time)
    if handle is None:
        return False
    try:
        return handle.send(number)
    except OSError as error:
        raise HostError.of(f"send signal {number} to process {pid}", error) from None
    finally:
        handle.close()


def may_signal(pid: int) -> bool:
    """This process has the right to; also if there is no such process."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def state_of(pid: int, start_time: int) -> str:
    """The kernel's letter for it (R, S, D, T, ...); empty if that process has ended."""
    stat = read_stat(pid)
    return "" if stat is None or stat.start_time != start_time or stat.ended else stat.state


def wait_ended(pid: int, start_time: int, timeout_s: float) -> bool:
    """True once that process has ended, False if it goes on after `timeout_s`."""
    handle = Handle.open(pid, start_time)
    if handle is None:
        return True
    try:
        if handle.fd is not None:
            poll = select.poll()
            poll.register(handle.fd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000.0))
        deadline = time.monotonic() + timeout_s
        while not handle.ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        return handle.ended()
    finally:
        handle.close()
