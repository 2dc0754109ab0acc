"""Stop processes where they are (SIGSTOP): connections stay open, kernels go on answering, nothing moves.

A stopped process cannot be told from one that waits for a driver for ever, from outside: heartbeats of its native
threads stop too. SIGCONT by pid and start time takes it back; one that was killed meanwhile needs nothing.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.faults.processes import StoppedUndo
from agents.host.machine import Machine


class ProcHang(Fault[StoppedUndo]):
    spec = SPECS["proc-hang"]
    undo_type = StoppedUndo
    privileged = True

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return processes.refusal(machine, target) or processes.refusal_of_stopped(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> StoppedUndo:
        return StoppedUndo(processes.targets(machine, target))

    def inject(self, machine: Machine, undo: StoppedUndo) -> None:
        processes.stop(undo)

    def undo(self, machine: Machine, undo: StoppedUndo) -> str:
        return processes.resume(undo)

    def probe(self, machine: Machine, undo: StoppedUndo) -> Probe:
        return processes.stopped(undo)

    def by_hand(self, undo: StoppedUndo) -> list[str]:
        return processes.resume_by_hand(undo)
