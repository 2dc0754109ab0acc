"""The thread that looks at the node, about once a second, so that a request never has to.

What it saw last is one value that requests read without waiting. When the looking itself hangs or fails, the value gets
old, and its age becomes a problem of the node: an old "healthy" is worse than none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agents.api.models import GpuSummary, NicView, ProcessView
from agents.health.signals import Observed
from agents.host.errors import HostError
from agents.monitors.nicjudge import MANAGEMENT, Judgement, observed
from agents.monitors.nics import NicMonitor
from agents.monitors.processes import ProcessMonitor
from agents.monitors.rdma import RdmaMonitor
from agents.node import Parts

Emit = Callable[..., None]
OLD_S = 5.0  # beyond the poll interval
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Snapshot:
    at: float  # monotonic
    nics: tuple[tuple[NicView, tuple[Judgement, ...]], ...] = ()
    processes: tuple[ProcessView, ...] = ()
    rss_mb: float = 0.0
    cpu_percent: float = 0.0
    trouble: str = ""


class GpuSource(Protocol):
    """What a GpuMonitor knows, without asking anybody."""

    def summary(self) -> GpuSummary: ...
    def observed(self, faults: Mapping[int, str]) -> list[Observed]: ...


class Poller:
    def __init__(
        self, parts: Parts, nics: NicMonitor, gpus: GpuSource, rdma: RdmaMonitor, *, poll_s: float, emit: Emit
    ) -> None:
        self._parts = parts
        self._rdma = rdma
        self._nics = nics
        self._gpus = gpus
        self._processes = ProcessMonitor()
        self._poll_s = poll_s
        self._emit = emit
        self._end = threading.Event()
        self._cpu_at = (time.monotonic(), time.process_time())
        self._snapshot = Snapshot(time.monotonic(), trouble="not read yet")
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def start(self) -> None:
        """One look at once, so that the first answer is not empty, then one every `poll_s`."""
        self._look()
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(self._poll_s + 2)

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def trouble(self) -> str:
        """Why the view of the node is old; empty when it is fresh."""
        snapshot = self._snapshot
        age_s = time.monotonic() - snapshot.at
        if snapshot.trouble:
            return snapshot.trouble
        return f"looking at the node hangs since {age_s:.0f} s" if age_s > self._poll_s + OLD_S else ""

    def _run(self) -> None:
        while not self._end.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        before = self._snapshot
        faults: dict[str, str] = {}
        try:
            faults = self._parts.faults_by_nic()
            lately = self._parts.nics_faulted_lately()
            nics = tuple(self._nics.read(time.monotonic(), faults, wall=time.time(), lately=lately))
            trouble = ""
        except HostError as error:
            nics, trouble = before.nics, str(error)
        supervised = {p.pid for p in self._parts.processes() if p.pid is not None}
        ranks = self._parts.ranks()
        others = tuple(self._processes.read(ranks, supervised)) if ranks else ()
        cpu_percent = self._cpu_percent(before.cpu_percent)
        self._snapshot = Snapshot(time.monotonic(), nics, others, rss_mb(), cpu_percent, trouble)
        if trouble:
            if trouble != before.trouble:
                self._emit("node.unreadable", self._parts.name, trouble)
        else:
            seen = [observed(view, judgements, faults.get(view.name, "")) for view, judgements in nics]
            self._parts.health.see("nics", seen)
        self._parts.health.monitor("nics", ok=not trouble, note=trouble)
        self._parts.health.see("rdma", self._rdma.read(time.monotonic(), time.time(), self._no_rails(nics)))
        gpus = self._gpus.summary()
        self._parts.health.see("gpus", self._gpus.observed(self._parts.faults_by_gpu()))
        self._parts.health.monitor("gpus", ok=not gpus.note, note=gpus.note)
        self._parts.health.tick(self._parts.open_faults())

    @staticmethod
    def _no_rails(nics: tuple[tuple[NicView, tuple[Judgement, ...]], ...]) -> list[str]:
        """Whose RDMA ports are not used for training."""
        return [view.name for view, _judgements in nics if view.role == MANAGEMENT]

    def _cpu_percent(self, before: float) -> float:
        """Of one core, over at least ten seconds: shorter spans of a process at rest are noise."""
        at, used = self._cpu_at
        now = time.monotonic()
        if now - at < 10:
            return before
        now_used = time.process_time()
        self._cpu_at = (now, now_used)
        return 100 * (now_used - used) / (now - at)


def rss_mb() -> float:
    """Resident memory in MiB (proc_pid_statm(5), field 2, pages)."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read(256).split()[1]) * PAGE_BYTES / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0
