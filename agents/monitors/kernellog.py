"""The kernel log (/dev/kmsg), followed from the moment the agent starts.

One driver in trouble writes the same line hundreds of thousands of times. So equal ones of a batch are counted and told
once, with their number; the kernel overwrites what is not read in time (EPIPE), which the monitor's note says.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents.health.desk import HealthDesk
from agents.health.kernellog import MAX_RECORD, Line, SwitchLine, XidLine, line, record
from agents.health.xids import LOG, UNNUMBERED, Xid, switch_signal
from agents.monitors.xids import XidDesk

NAME = "kernel log"
BATCH_LINES = 4000
BATCH_KINDS = 256
MORE_S = 0.05  # how long a batch waits for another line
AGAIN_S = 10.0  # an open log that failed, or one that was not there
FILE_POLL_S = 0.2  # a plain file has no news to wait for

Place = Callable[[str], tuple[int, str] | None]  # PCI slot: GPU and UUID


class KernelLog:
    def __init__(self, path: Path, desk: HealthDesk, xids: XidDesk, place: Place) -> None:
        self._path = path
        self._desk = desk
        self._xids = xids
        self._place = place
        self._wake_reader, self._wake = os.pipe2(os.O_CLOEXEC)
        self._end = threading.Event()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="kernel-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                self._cannot(error)
                continue
            try:
                self._desk.monitor(NAME, ok=True)
                self._follow(_Source(handle))
            except OSError as error:
                self._cannot(error)
            finally:
                os.close(handle)

    def _cannot(self, error: OSError) -> None:
        hint = (
            " (it needs CAP_SYSLOG, or kernel.dmesg_restrict=0)" if error.errno in (errno.EPERM, errno.EACCES) else ""
        )
        why = f"{self._path} cannot be read: {error.strerror}{hint}; Xids come from NVML only"
        self._desk.monitor(NAME, ok=False, note=why)
        self._end.wait(AGAIN_S)

    def _follow(self, source: _Source) -> None:
        while not self._end.is_set():
            source.wait(self._wake_reader, 60.0)
            counted: dict[tuple[Line, str], tuple[int, str]] = {}
            for _number in range(BATCH_LINES):
                if self._end.is_set():
                    return
                try:
                    raw = source.read()
                except BrokenPipeError:
                    self._lost += 1
                    note = f"{self._lost} times lines were overwritten before they were read"
                    self._desk.monitor(NAME, ok=True, note=note)
                    continue
                if raw is None:
                    if counted or not source.wait(self._wake_reader, MORE_S):
                        break
                    continue
                self._count(counted, raw)
                if len(counted) >= BATCH_KINDS:
                    break
            for (found, fault), (count, text) in counted.items():
                self._tell(found, fault, text, count)

    @staticmethod
    def _count(counted: dict[tuple[Line, str], tuple[int, str]], raw: bytes) -> None:
        if b"Xid" not in raw and b"NVRM" not in raw:
            return
        told = record(raw)
        if told is None or not told.counts or (found := line(told.text)) is None:
            return
        count, text = counted.get((found, told.fault), (0, told.text))
        counted[found, told.fault] = (count + 1, text)

    def _tell(self, found: Line, fault: str, text: str, count: int) -> None:
        if isinstance(found, SwitchLine):
            signal = switch_signal(found.switch, found.code, fatal=found.fatal, link=found.link, text=text, fault=fault)
            self._desk.occur(signal, count)
            return
        self._xids.tell(self._xid(found, fault, text), count)

    def _xid(self, found: XidLine, fault: str, text: str) -> Xid:
        place = self._place(found.pci)
        name, uuid = (f"gpu {place[0]}", place[1]) if place is not None else (f"gpu {found.pci}", "")
        return Xid(
            found.code,
            name,
            LOG if found.numbered else UNNUMBERED,
            text,
            uuid,
            pid=found.pid,
            process=found.process,
            unit=found.unit,
            fatal=found.fatal,
            previous=found.previous,
            recovery=found.recovery,
            injected=bool(fault),
            fault=fault,
        )


class _Source:
    """Records of the device, one a read; lines of a pipe or a file, which may come in pieces."""

    def __init__(self, handle: int) -> None:
        mode = os.fstat(handle).st_mode
        self._handle = handle
        self._device, self._file = stat.S_ISCHR(mode), stat.S_ISREG(mode)
        self._rest = b""
        self._skip = False  # the rest of a line that was too long
        if self._device or self._file:
            os.lseek(handle, 0, os.SEEK_END)

    def wait(self, wake: int, for_s: float) -> bool:
        """Whether there may be something to read."""
        if self._file:
            select.select([wake], [], [], min(for_s, FILE_POLL_S))
            return b"\n" in self._rest or os.fstat(self._handle).st_size > os.lseek(self._handle, 0, os.SEEK_CUR)
        return b"\n" in self._rest or self._handle in select.select([self._handle, wake], [], [], for_s)[0]

    def read(self) -> bytes | None:
        """The next record; None: there is none now. Raises OSError; BrokenPipeError: some were overwritten."""
        if self._device:
            try:
                return os.read(self._handle, MAX_RECORD)
            except BlockingIOError:
                return None
        while b"\n" not in self._rest:
            try:
                data = os.read(self._handle, 65_536)
            except BlockingIOError:
                return None
            if not data:
                if not self._file:
                    time.sleep(FILE_POLL_S)  # a pipe that nobody writes to is always ready
                return None
            self._rest += data
            if b"\n" not in self._rest and len(self._rest) > MAX_RECORD:
                self._rest, self._skip = b"", True
        raw, _, self._rest = self._rest.partition(b"\n")
        if self._skip:
            self._skip = False
            return b""
        return raw
