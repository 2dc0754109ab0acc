"""What an agent of a simulated node has instead of a disk, a GPU, a watchdog and threads of its own.

Nothing of such a node outlives its process, so nothing needs to be on disk, and a thousand of them share few threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agents.api.models import GpuSummary, LinkProcessView, LinkRow
from agents.health.signals import Observed
from agents.injection.ledger import Content, Entry, Ledger, LedgerError
from agents.monitors.links import Counters
from agents.monitors.poller import Poller, Snapshot

SAME_LOOK_S = 0.02  # an answer is made from one look


class MemoryLedger(Ledger):
    """Entries in memory, behind a lock of this process."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        return

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise LedgerError(f"the ledger is in use since more than {timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def write(self, entry: Entry) -> None:
        self._entries[entry.id] = entry

    def remove(self, fault_id: str) -> None:
        self._entries.pop(fault_id, None)

    def read(self) -> Content:
        return Content(tuple(sorted(self._entries.values(), key=lambda e: e.created_boot_s)), ())

    def read_one(self, fault_id: str) -> Entry | None:
        return self._entries.get(fault_id)


class LookWhenAsked(Poller):
    """Looks at the node when a request wants to know: in memory that is quick."""

    def start(self) -> None:
        self._look()

    def snapshot(self) -> Snapshot:
        if time.monotonic() - self._snapshot.at >= SAME_LOOK_S:
            self._look()
        return self._snapshot


class NoGpus:
    def summary(self) -> GpuSummary:
        return GpuSummary(note="none (a simulated node)")

    def observed(self, faults: Mapping[int, str]) -> list[Observed]:
        return []


class NoLinks:
    """No process of a simulated node has links."""

    def views(self) -> list[LinkProcessView]:
        return []

    def counters(self) -> Counters:
        return Counters({}, {}, {})

    def rows(self, *, pid: int | None, rail: str, state: str, each: bool) -> list[LinkRow]:
        return []


class NoKennel:
    """A watchdog outlives its agent and takes back what is left; of a simulated node nothing is."""

    @property
    def pid(self) -> int | None:
        return None

    def start(self) -> None:
        return
