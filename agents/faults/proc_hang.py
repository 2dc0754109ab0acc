"""Stop processes where they are (SIGSTOP): connections stay open, kernels go on answering, nothing moves.

A stopped process cannot be told from one that waits for a driver for ever, from outside: heartbeats of its native
threads stop too. SIGCONT by pid and start time takes it back; one that was killed meanwhile needs nothing.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Params, Refusal, Target
from agents.faults.processes import Standstill, StoppedUndo
from agents.host.machine import Machine


class ProcHang(Standstill):
    spec = SPECS["proc-hang"]

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return processes.refusal(machine, target) or processes.refusal_of_stopped(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> StoppedUndo:
        return StoppedUndo(processes.targets(machine, target))
