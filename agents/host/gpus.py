"""The GPUs of this node as faults and the policy see them: which there are, whose processes use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agents.host.errors import HostError
from agents.host.simgpus import SimulatedGpus, SimulationProblem
from agents.host.workers import Worker


class Gpus(Protocol):
    @property
    def simulated(self) -> SimulatedGpus | None:
        """Their state, where they are no hardware."""
        ...

    def indexes(self) -> tuple[int, ...]:
        """Those that are known, in order; also one that does not answer now."""
        ...

    def why_none(self) -> str:
        """Why there are none; empty if there are."""
        ...

    def uuid(self, gpu: int) -> str:
        """Empty: not known."""
        ...

    def slot(self, gpu: int) -> str:
        """Its PCI slot, "0000:04:00"; empty: not known."""
        ...

    def pids(self, gpu: int) -> tuple[int, ...]:
        """The processes that compute on it, as far as the driver tells."""
        ...

    def report_xid(self, gpu: int, code: int) -> None:
        """An Xid that nobody but this agent is told. Raises HostError."""
        ...


class NoGpus:
    """Also what the watchdog has: an undo goes by its record."""

    simulated: SimulatedGpus | None = None

    def indexes(self) -> tuple[int, ...]:
        return ()

    def why_none(self) -> str:
        return "no GPUs are known here"

    def uuid(self, gpu: int) -> str:
        return ""

    def slot(self, gpu: int) -> str:
        return ""

    def pids(self, gpu: int) -> tuple[int, ...]:
        return ()

    def report_xid(self, gpu: int, code: int) -> None:
        raise HostError(f"report Xid {code}", 0, "only the agent itself can do that")


@dataclass(frozen=True)
class Seen:
    """What a monitor last saw: per GPU its index and processes; `note` why there are none."""

    gpus: Sequence[tuple[int, Sequence[int]]] = ()
    note: str = ""
    uuids: Mapping[int, str] = field(default_factory=dict)
    slots: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeGpus:
    """`look` never blocks. `announce` takes (gpu, Xid)."""

    look: Callable[[], Seen]
    announce: Callable[[int, int], None]
    simulated: SimulatedGpus | None = None

    def indexes(self) -> tuple[int, ...]:
        if self.simulated is not None:
            try:
                return tuple(range(self.simulated.count()))
            except SimulationProblem:
                return ()
        return tuple(index for index, _pids in self.look().gpus)

    def why_none(self) -> str:
        return "" if self.indexes() else self.look().note or "no GPUs"

    def uuid(self, gpu: int) -> str:
        return self.look().uuids.get(gpu, "")

    def slot(self, gpu: int) -> str:
        return self.look().slots.get(gpu, "")

    def pids(self, gpu: int) -> tuple[int, ...]:
        return next((tuple(pids) for index, pids in self.look().gpus if index == gpu), ())

    def report_xid(self, gpu: int, code: int) -> None:
        self.announce(gpu, code)


def users_of(pids: Sequence[int], workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """The ranks behind a GPU's processes. Where the driver names none of them, those of the only replica here: there is
    nobody else whose GPU it could be. None where several replicas share the node and nothing tells which."""
    named = tuple(worker for worker in workers if worker.pid in pids)
    if named or len({worker.replica for worker in workers}) != 1:
        return named
    return tuple(workers)
