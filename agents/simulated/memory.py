"""What an agent of a simulated node has instead of a disk, a GPU, a watchdog and threads of its own.

Nothing of such a node outlives its process, so nothing needs to be on disk, and a thousand of them share few threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from agents.api.models import GpuSummary, LinkProcessView, LinkRow
from agents.health.signals import Observed
from agents.http.context import Pool
from agents.injection.ledger import Content, Entry, Ledger, LedgerError
from agents.monitors.links import Counters
from agents.monitors.poller import Poller, Snapshot, rss_mb

T = TypeVar("T")

SAME_LOOK_S = 0.02  # an answer is made from one look
CALM_S = 60.0  # so long after the last fault, what it did has been seen and judged


class MemoryLedger(Ledger):
    """Entries in memory, behind a lock of this process."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self.changed_at = float("-inf")  # monotonic

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
        self.changed_at = time.monotonic()

    def remove(self, fault_id: str) -> None:
        self._entries.pop(fault_id, None)
        self.changed_at = time.monotonic()

    def read(self) -> Content:
        return Content(tuple(sorted(self._entries.values(), key=lambda e: e.created_boot_s)), ())

    def read_one(self, fault_id: str) -> Entry | None:
        return self._entries.get(fault_id)


class LookWhenAsked(Poller):
    """Looks at the node when a request wants to know, as long as it may look different from before: NICs in memory
    change by faults alone. A real agent looks by itself and answers from memory, too."""

    def __init__(self, ledger: MemoryLedger, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._ledger = ledger

    def start(self) -> None:
        self._look()

    def snapshot(self) -> Snapshot:
        now = time.monotonic()
        if now - self._snapshot.at >= SAME_LOOK_S:
            if self._calm(now):
                cpu_percent = self._cpu_percent(self._snapshot.cpu_percent)
                memory = _resources(int(now))
                self._snapshot = replace(self._snapshot, at=now, rss_mb=memory, cpu_percent=cpu_percent)
            else:
                self._look()
        return self._snapshot

    def _calm(self, now: float) -> bool:
        return (
            now - self._ledger.changed_at > CALM_S
            and not self._parts.open_faults()
            and not self._snapshot.trouble
            and not any(judgement.code for _nic, judgements in self._snapshot.nics for judgement in judgements)
        )


@lru_cache(maxsize=1)
def _resources(_second: int) -> float:
    """Resident memory of the one process, read once a second for all its nodes."""
    return rss_mb()


class AtOnce(Pool):
    """For what is in memory and waits for nobody: a thread would cost more than the call."""

    async def call(self, thing: str, late_code: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        return function(*args, **kwargs)


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
