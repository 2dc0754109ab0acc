"""What happened, numbered: a bounded window in memory for operators, and every event as a JSON line in the store.

The file is for people and reports, never for decisions. So it is not fsynced, and a full disk costs lines in the file
(said once), not events in the window. Numbers go on where the file ended: a restart of the coordinator does not start
them anew.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

import msgspec

from ftar_core.wire.messages import EventView

log = logging.getLogger("ftar.coordinator")
KEEP = 5000  # in memory: hours of a bad day
MAX_FILE_BYTES = 32 * 1024 * 1024  # then the file becomes events.jsonl.1, and that one goes
TAIL_BYTES = 1024 * 1024  # read at start
REPLY_LIMIT = 1000  # events in one answer; the caller asks again after the last


class EventLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path.with_name(path.name + ".1")
        self._cut_short = False  # a crash left the last line without its end
        self._last_line_open = False
        self._events: deque[EventView] = deque(self._tail(), maxlen=KEEP)
        self._last = self._events[-1].seq if self._events else 0
        self._descriptor = -1
        self._size = 0
        self._trouble = ""
        try:
            self._open()
        except OSError as error:
            self._note(error)

    def add(self, event: EventView, time: float) -> EventView:
        """Number and date an event (Unix seconds), keep it, append it to the file."""
        self._last += 1
        event = msgspec.structs.replace(event, seq=self._last, time=time)
        self._events.append(event)
        self._append(msgspec.json.encode(event) + b"\n")
        return event

    def after(self, seq: int) -> tuple[EventView, ...]:
        """The first REPLY_LIMIT events with a number above `seq`."""
        newer = [event for event in self._events if event.seq > seq]
        return tuple(newer[:REPLY_LIMIT])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        try:
            if self._size + len(line) > MAX_FILE_BYTES:
                self.close()
                self._path.replace(self._aside)
            if self._descriptor < 0:
                self._open()
            written = os.write(self._descriptor, line)
            self._size += written
            if written < len(line):  # the disk became full in the middle: do not leave half a line
                os.ftruncate(self._descriptor, self._size - written)
                self._size -= written
                raise OSError(28, "No space left on device")
            self._trouble = ""
        except OSError as error:
            self._note(error)

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._descriptor).st_size
        if self._cut_short:
            self._cut_short = False
            self._size += os.write(self._descriptor, b"\n")

    def _note(self, error: OSError) -> None:
        if self._trouble != str(error.strerror):
            self._trouble = str(error.strerror)
            log.warning("%s: events are not written: %s", self._path, error.strerror)

    def _tail(self) -> list[EventView]:
        """The newest events on disk. The file is empty for a moment after it was put aside, hence the second look."""
        events = self._read(self._path)
        self._cut_short = self._last_line_open
        return events or self._read(self._aside)

    def _read(self, path: Path) -> list[EventView]:
        self._last_line_open = False
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).split(b"\n")
        except OSError:
            return []
        self._last_line_open = lines[-1] != b""
        if size > TAIL_BYTES:
            del lines[0]  # begins somewhere in a line
        events: list[EventView] = []
        for line in lines:
            try:
                event = msgspec.json.decode(line, type=EventView)
            except (msgspec.DecodeError, ValueError):
                continue  # an empty last line, or one that a crash cut short
            if not events or event.seq > events[-1].seq:
                events.append(event)
        return events
