"""The thread that keeps the promise "never longer than its duration" while the agent lives.

It sleeps until the next deadline, at most a second while a fault is open (then it also looks whether the fault is still
in force, and what the watchdog did on disk), and for long when none is, so that an agent at rest costs nothing. Faults
that come and go have their turns in between.
"""

from __future__ import annotations

import threading

from agents.api.words import FaultState
from agents.injection.book import Emit
from agents.injection.injector import Injector
from agents.injection.ledger import Entry, LedgerError

LOOK_S = 1.0
REST_S = 300.0
STUCK_RETRY_S = 20.0


class Deadlines:
    def __init__(self, injector: Injector, emit: Emit, node: str) -> None:
        self._injector = injector
        self._book = injector.book
        self._emit = emit
        self._node = node
        self._retry_boot_s: dict[str, float] = {}
        self._looked_boot_s = -LOOK_S
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="fault-deadlines", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        with self._book.changed:
            self._ending = True
            self._book.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def tick(self) -> None:
        """Take back what is due, try stuck faults again, look at the others. Raises LedgerError."""
        self._looked_boot_s = self._injector.now_boot_s()
        self._injector.beats.beat()
        for entry in self._book.open():
            if self._injector.left_s(entry) > 0 and entry.state in (FaultState.ARMED, FaultState.ACTIVE):
                continue
            if entry.state in (FaultState.ARMED, FaultState.ACTIVE):
                self._injector.revert_now(entry, _why(entry))
                continue
            now_boot_s = self._injector.now_boot_s()
            if self._retry_boot_s.setdefault(entry.id, now_boot_s + STUCK_RETRY_S) <= now_boot_s:
                self._retry_boot_s[entry.id] = now_boot_s + STUCK_RETRY_S
                self._injector.revert_now(entry, "another attempt", tries=1)
        self._injector.refresh()
        self._injector.look()

    def _run(self) -> None:
        last = ""
        while True:
            with self._book.changed:
                if not self._ending:
                    self._book.changed.wait(self._sleep_s())
                if self._ending:
                    return
            try:
                if self._only_a_beat():
                    self._injector.beats.beat()
                else:
                    self.tick()
                last = ""
            except LedgerError as error:
                last = self._complain(str(error), last)
            except Exception as error:  # noqa: BLE001 - a bug in one fault must not end the deadlines of all
                last = self._complain(f"{type(error).__name__}: {error}", last)

    def _complain(self, text: str, last: str) -> str:
        """Said once, not every second. Called between two looks; the wait keeps it from spinning."""
        if text != last:
            self._emit("ledger.failed", self._node, text)
        with self._book.changed:
            if not self._ending:
                self._book.changed.wait(LOOK_S / 2)
        return text

    def _sleep_s(self) -> float:
        opened = self._book.open()
        if not opened:
            return REST_S
        waits = [self._injector.left_s(e) for e in opened if e.state in (FaultState.ARMED, FaultState.ACTIVE)]
        return min([LOOK_S, self._injector.beats.wait_s(), *waits])

    def _only_a_beat(self) -> bool:
        """Woken for the turn of a fault, and for nothing else."""
        if self._injector.beats.wait_s() > 0 or self._injector.now_boot_s() - self._looked_boot_s >= LOOK_S:
            return False
        opened = [e for e in self._book.open() if e.state in (FaultState.ARMED, FaultState.ACTIVE)]
        return all(self._injector.left_s(entry) > 0 for entry in opened)


def _why(entry: Entry) -> str:
    silent = entry.dead_man_s is not None and entry.due_boot_s() < entry.deadline_boot_s
    return f"its controller was silent for {entry.dead_man_s:g} s" if silent else "its time is up"
