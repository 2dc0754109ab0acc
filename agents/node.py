"""The parts of a running agent, as the monitors and the HTTP routes see them."""

from __future__ import annotations

from dataclasses import dataclass

from agents.api.models import ProcessView, RankView
from agents.health.desk import HealthDesk
from agents.injection.control import FaultControl
from agents.recovery.ranks import RankRegistry
from agents.recovery.supervisor import Supervisor


@dataclass(frozen=True)
class Parts:
    """There is an injector even where no faults may be injected: a predecessor may have left some."""

    name: str
    injector: FaultControl
    supervisor: Supervisor | None
    registry: RankRegistry | None
    health: HealthDesk

    def faults_by_nic(self) -> dict[str, str]:
        """NIC -> id of the open fault on it."""
        entries = self.injector.entries()
        return {entry.target.nic: entry.id for entry in entries if entry.open and entry.target.nic}

    def faults_by_gpu(self) -> dict[int, str]:
        """Index of a GPU -> id of the open fault on it; -1: on the driver."""
        opened = [entry for entry in self.injector.entries() if entry.open]
        return {e.target.gpu: e.id for e in opened if e.target.gpu >= 0 or e.kind == "nvml-hang"}

    def open_faults(self) -> frozenset[str]:
        return frozenset(entry.id for entry in self.injector.entries() if entry.open)

    def processes(self) -> list[ProcessView]:
        return self.supervisor.views() if self.supervisor is not None else []

    def ranks(self) -> list[RankView]:
        return self.registry.views() if self.registry is not None else []
