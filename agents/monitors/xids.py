"""Xids on their way to the health desk, as NVML's events and as lines of the kernel log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agents.health.desk import HealthDesk
from agents.health.xids import NVML, Xid, signal_of
from agents.health.xidtable import XidTable
from agents.monitors.nvml_child import XidSeen


class XidDesk:
    """Thread-safe."""

    def __init__(self, desk: HealthDesk, table: XidTable, fault_of: Callable[[int], str] = lambda gpu: "") -> None:
        """`fault_of`: the id of the open fault that makes Xids of that GPU, or nothing."""
        self._desk = desk
        self._table = table
        self._fault_of = fault_of

    def seen(self, seen: XidSeen) -> None:
        """NVML told it."""
        name = f"gpu {seen.index}" if seen.index >= 0 else "gpu unknown"
        mark = " (simulated)" if seen.simulated else ""
        by = "injected in this agent" if seen.injected else "NVML"
        text = f"{by}: Xid {seen.code} on {seen.uuid or 'a GPU that it cannot name'}{mark}"
        self.tell(
            Xid(
                seen.code,
                name,
                NVML,
                text,
                seen.uuid,
                recovery=seen.recovery,
                injected=seen.injected or seen.simulated,  # a simulated GPU has no Xids of its own
                fault=self._fault_of(seen.index) if seen.injected or seen.simulated else "",
                simulated=seen.simulated,
            )
        )

    def tell(self, xid: Xid, count: int = 1) -> str:
        """The id of its incident."""
        known = self._desk.codes("gpu", xid.object)
        return self._desk.occur(signal_of(self._table, xid, known, _alive), count)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
