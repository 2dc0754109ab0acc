"""The parts of a running agent, as the monitors and the HTTP routes see them."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.api.models import ProcessView, RankView
from agents.health.desk import HealthDesk
from agents.injection.control import FaultControl
from agents.injection.lately import Lately
from agents.injection.ledger import Entry
from agents.recovery.ranks import RankRegistry
from agents.recovery.supervisor import Supervisor

STALE_READING_S = 5.0  # GPUs are read once a second, and looked at once a second


@dataclass(frozen=True)
class Parts:
    """There is an injector even where no faults may be injected: a predecessor may have left some."""

    name: str
    injector: FaultControl
    supervisor: Supervisor | None
    registry: RankRegistry | None
    health: HealthDesk
    rails: tuple[str, ...] = ()
    lately: Lately = field(default_factory=Lately)

    def faults_by_nic(self) -> dict[str, str]:
        """NIC -> id of the open fault on it."""
        return {nic: entry.id for entry in self.injector.entries() if entry.open for nic in self._nics_of(entry)}

    def nics_faulted_lately(self) -> frozenset[str]:
        """Whose fault was reverted just now: what they counted until then is its doing."""
        entries = self.injector.entries()
        lately = self.lately.look(entries, STALE_READING_S)
        return frozenset(nic for entry in entries if entry.id in lately for nic in self._nics_of(entry))

    def _nics_of(self, entry: Entry) -> tuple[str, ...]:
        if entry.kind == "node-down":
            return self.rails
        return (entry.target.nic,) if entry.target.nic else ()

    def faults_by_gpu(self) -> dict[int, str]:
        """Index of a GPU -> id of the open fault on it; -1: on the driver. Also one that was reverted just now: what
        was read before is its doing."""
        entries = self.injector.entries()
        lately = self.lately.look(entries, STALE_READING_S)
        found = [entry for entry in entries if entry.open or entry.id in lately]
        return {e.target.gpu: e.id for e in found if e.target.gpu >= 0 or e.kind == "nvml-hang"}

    def open_faults(self) -> frozenset[str]:
        return frozenset(entry.id for entry in self.injector.entries() if entry.open)

    def processes(self) -> list[ProcessView]:
        return self.supervisor.views() if self.supervisor is not None else []

    def ranks(self) -> list[RankView]:
        return self.registry.views() if self.registry is not None else []
