"""The ledger's content in memory, so that a hung disk cannot hang a status, and a full one cannot hide a fault."""

from __future__ import annotations

import threading
from collections.abc import Callable

from agents.api.words import FaultState
from agents.injection.ledger import Damaged, Entry, Ledger

MAX_CANCELLED = 256
MAX_UNRECORDED = 64

Emit = Callable[[str, str, str], None]  # kind, object, reason


class Book:
    """Thread-safe. `changed` is notified whenever an entry changes here."""

    def __init__(self, ledger: Ledger, emit: Emit, node: str) -> None:
        self._ledger = ledger
        self._emit = emit
        self._node = node
        self.changed = threading.Condition()
        self.damaged: tuple[Damaged, ...] = ()
        self._entries: dict[str, Entry] = {}
        self._cancelled: dict[str, None] = {}

    def entries(self) -> list[Entry]:
        """Open faults and those reverted lately, oldest first."""
        with self.changed:
            return sorted(self._entries.values(), key=lambda e: e.created_boot_s)

    def open(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.open]

    def find(self, name: str) -> Entry | None:
        """By fault id, or by the request id that made it."""
        with self.changed:
            known = self._entries.get(name)
            return known or next((e for e in self._entries.values() if name and e.request_id == name), None)

    def keep(self, entry: Entry) -> Entry:
        with self.changed:
            self._entries[entry.id] = entry
            self.changed.notify_all()
        return entry

    def read(self) -> None:
        """Take over what is on disk; call it under the ledger's lock. Raises LedgerError.

        The disk may be behind (it was full): an entry armed there and active here is active. An entry that was
        reverted here and could only be removed there is kept for the record.
        """
        content = self._ledger.read()
        for damaged in content.damaged:
            if damaged not in self.damaged:
                self._emit("ledger.damaged", self._node, f"{damaged.path}: {damaged.reason}")
        with self.changed:
            before = self._entries
            self._entries = {}
            for entry in content.entries:
                ours = before.get(entry.id)
                behind = ours is not None and ours.state is FaultState.ACTIVE and entry.state is FaultState.ARMED
                same = ours is not None and ours.state is entry.state
                self._entries[entry.id] = ours if ours is not None and (behind or same) else entry
            gone = [e for e in before.values() if e.id not in self._entries and not e.open]
            for entry in gone[-MAX_UNRECORDED:]:
                self._entries[entry.id] = entry
            self.damaged = content.damaged

    def forget(self, entry: Entry) -> None:
        with self.changed:
            self._entries.pop(entry.id, None)

    def cancel(self, request_id: str) -> None:
        """This request was taken back before it arrived: refuse it when it does."""
        with self.changed:
            self._cancelled[request_id] = None
            while len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]

    def cancelled(self, request_id: str) -> bool:
        with self.changed:
            return request_id in self._cancelled
