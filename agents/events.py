"""What happened on this node, numbered: the last ones in memory for the API, all on disk for the post-mortem.

STATE/events.jsonl is one JSON object a line; at 4 MiB it becomes events.jsonl.1 and a new one begins, so both together
are bounded. A full disk costs the file, not the events: those in memory go on. Numbers begin at 1 with every agent;
`boot` names the numbering, so that a reader who comes back after a restart does not miss what has a low number again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from agents.api.models import EventRecord, EventsAnswer

KEPT = 2000
ROTATE_BYTES = 4 * 2**20
MAX_TEXT = 2000


class EventLog:
    """Thread-safe. Every event is also a line on standard error, the agent's log."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._boot = secrets.token_hex(6)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._events: deque[EventRecord] = deque(maxlen=KEPT)
        self._last = 0
        self._size = self._file_size()
        self._broken = False

    @property
    def last(self) -> int:
        return self._last

    @property
    def boot(self) -> str:
        return self._boot

    def emit(self, kind: str, thing: str, reason: str, *, injected: bool = False) -> None:
        """`kind` like "rail.down", `thing` like "node1/rail0". What a fault of ours does is marked `injected`."""
        with self._lock:
            self._last += 1
            event = EventRecord(
                seq=self._last,
                time=time.time(),
                source=self._node,
                kind=kind,
                object=thing[:MAX_TEXT],
                reason=_one_line(reason),
                injected=injected or kind.startswith("fault."),
            )
            self._events.append(event)
            self._write(event)
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
        _log(f"{event.kind} {event.object}: {event.reason}")

    def after(self, seq: int, limit: int) -> EventsAnswer:
        """Events with a number above `seq`, the oldest first, at most `limit`."""
        with self._lock:
            chosen = [event for event in self._events if event.seq > seq][:limit]
            last = chosen[-1].seq if chosen else self._last
            return EventsAnswer(events=chosen, last=last, boot=self._boot)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every event, in the thread that emitted it; it must be quick."""
        with self._lock:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def _file_size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _write(self, event: EventRecord) -> None:
        line = event.model_dump_json().encode() + b"\n"
        try:
            if self._size + len(line) > ROTATE_BYTES and self._size:
                os.replace(self._path, self._path.with_suffix(self._path.suffix + ".1"))
                self._size = 0
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._size += os.write(handle, line)
            finally:
                os.close(handle)
            self._broken = False
        except OSError as error:
            if not self._broken:
                _log(f"{self._path}: {error.strerror}; events go on in memory only")
            self._broken = True


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk under the log, or nobody who reads it, must not stop the agent
        print(f"ft-agent: {line}", file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT]
