"""The training processes of this node, as faults see them: who they are, and the one way to tell one of them something.

Who they are is known from the agent's supervisor and from the socket on which ranks register. A process without either
(the watchdog) has `NoWorkers`: a fault's undo goes by the pids and start times in its record.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from agents.host.errors import HostError


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's process. `start_time` (proc_pid_stat(5)) tells it from a later one of the same number."""

    replica: str
    rank: int
    pid: int
    start_time: int

    @property
    def text(self) -> str:
        return f"process {self.pid} ({self.replica}{f' rank {self.rank}' if self.rank >= 0 else ''})"


class Armed(msgspec.Struct, frozen=True):
    """Orders that a rank has taken from its agent, and breakpoints of them that wait for their moment."""

    taken: int
    waiting: int


class Workers(Protocol):
    def all(self) -> tuple[Worker, ...]:
        """Those that live, by replica and rank."""
        ...

    def tell(self, worker: Worker, message: msgspec.Struct) -> None:
        """Send it a message of ftar_core/wire/agentlink.py over the connection that it made to its agent. No answer
        comes; one that was not started for it does not listen. Raises HostError."""
        ...

    def listens(self, worker: Worker) -> bool:
        """It takes what `tell` sends: it is connected, and was started so."""
        ...

    def armed(self, worker: Worker) -> Armed | None:
        """What it says about breakpoints in its last report; None if it cannot be asked."""
        ...


class NoWorkers:
    def all(self) -> tuple[Worker, ...]:
        return ()

    def tell(self, worker: Worker, message: msgspec.Struct) -> None:
        raise HostError(f"tell {worker.text} something", 0, "only the agent itself is connected to it")

    def listens(self, worker: Worker) -> bool:
        return False

    def armed(self, worker: Worker) -> Armed | None:
        return None


def aimed_at(workers: tuple[Worker, ...], replica: str, rank: int) -> tuple[Worker, ...]:
    """Those of a replica, or the one of its rank (`rank` below 0: all)."""
    return tuple(w for w in workers if w.replica == replica and (rank < 0 or w.rank == rank))
