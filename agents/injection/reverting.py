"""Taking a fault back, the same way for agent, restarted agent and watchdog.

One attempt: undo, then look. Only the look counts. A failed attempt is repeated after 0.1, 0.2, 0.4, 0.8 and 1.6 s:
what heals by itself (an IPv6 address that is still being checked for duplicates, a driver that is busy) does so within
seconds, and the promise is that a fault is gone two seconds after its time. After that it is `stuck`: a person gets the
commands, and slow attempts go on behind.

A full disk must not keep a fault in force: what cannot be recorded is done anyway, and a record that cannot be brought
up to date is removed instead, which needs no space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from agents.api.words import FaultState
from agents.faults.catalog import CATALOG, AnyFault, read_undo
from agents.faults.contract import Probe
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.injection.ledger import Entry, Ledger, LedgerError
from agents.injection.lifecycle import Move, after

BACKOFF_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
LOCK_TIMEOUT_S = 10.0


class Reverter:
    """Takes faults back. `sleep` is a parameter so that tests need not wait."""

    def __init__(
        self,
        ledger: Ledger,
        machine: Machine,
        catalog: Mapping[str, AnyFault] = CATALOG,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ledger = ledger
        self._machine = machine
        self._catalog = catalog
        self._sleep = sleep

    def revert(self, fault_id: str, why: str, tries: int = len(BACKOFF_S)) -> Entry | None:
        """The entry afterwards: reverted or stuck. None if there is no such entry. Raises LedgerError if it cannot be
        read or locked (then nothing was done)."""
        entry: Entry | None = None
        for attempt, delay_s in enumerate(BACKOFF_S[:tries]):
            if delay_s:
                self._sleep(delay_s)
            with self._ledger.locked(LOCK_TIMEOUT_S):
                entry = self._ledger.read_one(fault_id)
                if entry is None or not entry.open:
                    return entry
                entry = self.attempt(entry, why, last=attempt + 1 == tries)
            if entry.state is not FaultState.REVERTING:
                break
        return entry

    def attempt(self, entry: Entry, why: str, *, last: bool) -> Entry:
        """One attempt; the caller holds the lock and has read the entry under it."""
        entry = msgspec.structs.replace(
            entry,
            state=after(entry.state, Move.REVERT),
            attempts=entry.attempts + 1,
            detail=f"being reverted: {why}",
        )
        self._record(entry)
        done, sentence = self._undo(entry)
        if done:
            entry = msgspec.structs.replace(
                entry,
                state=after(entry.state, Move.UNDONE),
                detail=f"reverted: {why}; {sentence}",
                reverted=self._machine.clock.wall_s(),
                over_boot_s=self._machine.clock.boot_s(),
            )
        elif last:
            entry = msgspec.structs.replace(
                entry,
                state=after(entry.state, Move.GAVE_UP),
                detail=f"may still be in force: {sentence} ({entry.attempts} attempts to revert: {why})",
            )
        else:
            entry = msgspec.structs.replace(entry, detail=f"being reverted: {why}; not yet: {sentence}")
        self._record(entry)
        return entry

    def probe(self, entry: Entry) -> Probe:
        """Is the fault of this entry in force? Never raises."""
        try:
            fault, record = self._fault_of(entry)
            return fault.probe(self._machine, record)
        except (_Unknown, HostError) as error:
            return Probe(None, str(error))

    def by_hand(self, entry: Entry) -> list[str]:
        try:
            fault, record = self._fault_of(entry)
        except _Unknown as error:
            return [f"# {error}"]
        return fault.by_hand(record)

    def _undo(self, entry: Entry) -> tuple[bool, str]:
        try:
            fault, record = self._fault_of(entry)
            if entry.boot_id != self._machine.clock.boot_id() and not fault.survives_boot:
                return True, "the machine was started anew since, and nothing of it is left"
            sentence = fault.undo(self._machine, record)
            if fault.irreversible:
                return True, f"irreversible: {sentence}"
            look = fault.probe(self._machine, record)
        except (_Unknown, HostError) as error:
            return False, str(error)
        return (True, sentence) if look.in_force is False else (False, look.sentence)

    def _fault_of(self, entry: Entry) -> tuple[AnyFault, msgspec.Struct]:
        fault = self._catalog.get(entry.kind)
        if fault is None:
            raise _Unknown(f"this agent knows no fault {entry.kind}")
        try:
            return fault, read_undo(fault, bytes(entry.undo))
        except (msgspec.DecodeError, ValueError) as error:
            raise _Unknown(f"the undo record cannot be read: {error}") from None

    def _record(self, entry: Entry) -> None:
        try:
            self._ledger.write(entry)
        except LedgerError:
            if not entry.open:
                try:
                    self._ledger.remove(entry.id)
                except LedgerError:
                    pass  # the next agent reverts it once more, which does no harm


class _Unknown(Exception):
    """The entry is of another version of the agent."""
