"""What happened on this node, numbered: the last ones in memory for the API, all on disk for the post-mortem.

Telling an event never waits: it goes to memory, and one thread writes it to STATE/events.jsonl (one JSON object a line)
and to standard error. A disk that hangs, or a log that nobody reads, therefore stops neither a revert nor an answer; a
full disk costs the file, not the events. At 4 MiB the file becomes events.jsonl.1 and a new one begins, so both
together are bounded. Numbers begin at 1 with every agent; `boot` names the numbering, so that a reader who comes back
after a restart does not take a low number for an old event.
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
UNWRITTEN = 5000
ROTATE_BYTES = 4 * 2**20
MAX_TEXT = 2000
FLUSH_S = 2.0


class EventLog:
    """Thread-safe. Without a path (a simulated node) events are in memory only, and no thread is started."""

    def __init__(self, path: Path | None, node: str) -> None:
        self._node = node
        self._boot = secrets.token_hex(6)
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._events: deque[EventRecord] = deque(maxlen=KEPT)
        self._unwritten: deque[EventRecord] = deque(maxlen=UNWRITTEN)
        self._last = 0
        self._ending = False
        self._writer: threading.Thread | None = None
        if path is not None:
            file = _EventFile(path)
            self._writer = threading.Thread(target=self._write, args=(file,), name="events", daemon=True)
            self._writer.start()

    @property
    def last(self) -> int:
        return self._last

    @property
    def boot(self) -> str:
        return self._boot

    def emit(
        self,
        kind: str,
        thing: str,
        reason: str,
        *,
        injected: bool = False,
        age_s: float = 0.0,
        incident: str = "",
        verdict: str = "",
        action: str = "",
        evidence: str = "",
    ) -> None:
        """`kind` like "rail.down", `thing` like "node1/rail0". What a fault of ours does is marked `injected`.
        `age_s`: how long ago it happened, for what is heard of later. The rest as in EventRecord."""
        with self._changed:
            self._last += 1
            event = EventRecord(
                seq=self._last,
                time=time.time() - max(0.0, age_s),
                source=self._node,
                kind=kind,
                object=thing[:MAX_TEXT],
                reason=" ".join(reason.split())[:MAX_TEXT],
                injected=injected or kind.startswith("fault."),
                node=self._node,
                incident=incident,
                verdict=verdict,
                action=action,
                evidence=evidence[:MAX_TEXT],
            )
            self._events.append(event)
            if self._writer is not None:
                self._unwritten.append(event)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def after(self, seq: int, limit: int) -> EventsAnswer:
        """Events with a number above `seq`, the oldest first, at most `limit`."""
        with self._changed:
            chosen = [event for event in self._events if event.seq > seq][:limit]
            last = chosen[-1].seq if chosen else self._last
            return EventsAnswer(events=chosen, last=last, boot=self._boot)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every event, in the thread that emitted it; it must be quick."""
        with self._changed:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._changed:
            self._listeners.remove(listener)

    def close(self) -> None:
        """Write what is left, within FLUSH_S."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(FLUSH_S)

    def _write(self, file: _EventFile) -> None:
        while True:
            with self._changed:
                while not self._unwritten and not self._ending:
                    self._changed.wait()
                if not self._unwritten:
                    return
                event = self._unwritten.popleft()
            _log(f"{event.kind} {event.object}: {event.reason}")
            file.write(event)


class _EventFile:
    """One thread's: the file and its predecessor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._broken = False
        try:
            self._size = path.stat().st_size
        except OSError:
            self._size = 0

    def write(self, event: EventRecord) -> None:
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
    with contextlib.suppress(OSError, ValueError):  # a full disk under the log, or nobody who reads it
        print(f"ft-agent: {line}", file=sys.stderr, flush=True)
