"""The turns of faults that come and go (a flapping link, a slowed process) while the agent lives.

Which turn it is at a moment is a pure function of the time since the injection (agents/faults/rhythm.py); here the
system is made to follow. Every change is made under the ledger's lock, on what is on disk then: a fault that anybody
has begun to take back is never put in force again. Without an agent nothing turns any more, and the watchdog's undo
works in either phase.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agents.api.words import FaultState
from agents.faults.catalog import AnyFault, read_undo
from agents.faults.rhythm import Phase, Rhythm, phase
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.injection.book import Book
from agents.injection.ledger import Entry, Ledger

RETRY_S = 0.2  # after a turn that failed


class Beats:
    """`beat` raises LedgerError. One thread calls it; `resting` may be read by any."""

    def __init__(self, ledger: Ledger, machine: Machine, book: Book, catalog: Mapping[str, AnyFault]) -> None:
        self._ledger, self._machine, self._book, self._catalog = ledger, machine, book, catalog
        self.resting: frozenset[str] = frozenset()  # ids of faults in a pause
        self._retry_boot_s: dict[str, float] = {}

    def beat(self) -> None:
        """Bring every fault that comes and goes into the phase that it should be in."""
        active = [entry for entry in self._book.open() if entry.state is FaultState.ACTIVE]
        self.resting &= {entry.id for entry in active}
        for entry in active:
            now = self._machine.clock.boot_s()
            due = self._phase(entry, now)
            if due is None or due.on is not (entry.id in self.resting) or self._retry_boot_s.get(entry.id, 0.0) > now:
                continue
            self._turn(entry, on=due.on, now=now)

    def wait_s(self) -> float:
        """Until the next change of any of them; infinite if none comes and goes."""
        wait_s = float("inf")
        now = self._machine.clock.boot_s()
        for entry in self._book.open():
            due = self._phase(entry, now) if entry.state is FaultState.ACTIVE else None
            if due is not None:
                late = due.on is (entry.id in self.resting)
                retry_s = self._retry_boot_s.get(entry.id, 0.0) - now
                wait_s = min(wait_s, max(0.0, retry_s) if late else due.left_s)
        return wait_s

    def _phase(self, entry: Entry, now: float) -> Phase | None:
        rhythm = self._rhythm(entry)
        return None if rhythm is None else phase(rhythm, now - entry.created_boot_s)

    def _rhythm(self, entry: Entry) -> Rhythm | None:
        fault = self._catalog.get(entry.kind)
        if fault is None:
            return None
        try:
            return fault.rhythm(read_undo(fault, bytes(entry.undo)))
        except (msgspec.DecodeError, ValueError):
            return None

    def _turn(self, entry: Entry, *, on: bool, now: float) -> None:
        fault = self._catalog[entry.kind]
        with self._ledger.locked(RETRY_S):
            current = self._ledger.read_one(entry.id)
            if current is None or current.state is not FaultState.ACTIVE:
                return
            try:
                record = read_undo(fault, bytes(current.undo))
                if on:
                    record = self._keep(current, fault.again(self._machine, record))
                    fault.inject(self._machine, record)
                    self._keep(current, fault.settled(self._machine, record))
                else:
                    fault.undo(self._machine, record)
            except HostError as error:
                self._retry_boot_s[entry.id] = now + RETRY_S
                self._book.keep(msgspec.structs.replace(current, detail=f"a turn failed: {error}"))
                return
            self._retry_boot_s.pop(entry.id, None)
            self.resting = self.resting - {entry.id} if on else self.resting | {entry.id}

    def _keep(self, entry: Entry, record: msgspec.Struct) -> msgspec.Struct:
        """The record as it will be needed, on disk before it is."""
        raw = msgspec.Raw(msgspec.json.encode(record))
        if bytes(raw) != bytes(entry.undo):
            entry = msgspec.structs.replace(entry, undo=raw)
            self._ledger.write(entry)
            self._book.keep(entry)
        return record
