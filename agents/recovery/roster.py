"""The training processes of this node: those that the supervisor started, and those that came to the ranks' socket."""

from __future__ import annotations

import msgspec

from agents.host.errors import HostError
from agents.host.workers import Armed, Worker
from agents.recovery.ranks import RankRegistry
from agents.recovery.supervisor import Supervisor


class Roster:
    """Workers of agents/host/workers.py. Any thread."""

    def __init__(self, supervisor: Supervisor | None, registry: RankRegistry | None) -> None:
        self._supervisor, self._registry = supervisor, registry

    def all(self) -> tuple[Worker, ...]:
        registered = self._registry.workers() if self._registry is not None else []
        supervised = self._supervisor.workers() if self._supervisor is not None else []
        # A supervisor's word counts more: a rank that was replaced may still be shown by its old connection.
        found = {(w.replica, w.rank): w for w in (*registered, *supervised)}
        return tuple(found[key] for key in sorted(found))

    def tell(self, worker: Worker, message: msgspec.Struct) -> None:
        if self._registry is None:
            raise HostError(f"tell {worker.text} something", 0, "this agent has no socket for ranks (ranks_socket)")
        self._registry.tell(worker, message)

    def listens(self, worker: Worker) -> bool:
        return self._registry is not None and self._registry.listens(worker)

    def armed(self, worker: Worker) -> Armed | None:
        return self._registry.armed(worker) if self._registry is not None else None
