"""Faults on the job's coordinator, where it runs on the agent's own machine (in the lab, on a head node).

Which process it is the coordinator says itself; it is believed only where a process of that number, of that age, with a
coordinator's command line is here (agents/host/coordinators.py).
"""

from __future__ import annotations

import signal

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.faults.proc_kill import ENDS_WITHIN_S, KillUndo
from agents.faults.processes import Standstill, StoppedUndo
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.processes import send_to, state_of, wait_ended


def _refusal(machine: Machine, target: Target) -> Refusal | None:
    try:
        found = machine.coordinator()
    except HostError as error:
        return Refusal("refused", f"the coordinator is no process of {target.node}: {error.text}", "--node NODE")
    if state_of(found.pid, found.start_time) in tuple(processes.STOPPED):
        return Refusal("refused", f"{found.text} is stopped already, and not by a fault of ours")
    return processes.refusal_of_foreign((found,))


class CoordinatorKill(Fault[KillUndo]):
    spec = SPECS["coordinator-kill"]
    undo_type = KillUndo
    privileged = True

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return _refusal(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> KillUndo:
        return KillUndo((machine.coordinator(),), "KILL")

    def inject(self, machine: Machine, undo: KillUndo) -> None:
        for worker in undo.processes:
            if not send_to(worker.pid, worker.start_time, signal.SIGKILL):
                raise HostError(f"kill {worker.text}", 0, "it has just ended by itself")
            wait_ended(worker.pid, worker.start_time, ENDS_WITHIN_S)

    def undo(self, machine: Machine, undo: KillUndo) -> str:
        return "what was ended stays so; its supervisor starts it again"

    def probe(self, machine: Machine, undo: KillUndo) -> Probe:
        alive = [w for w in undo.processes if state_of(w.pid, w.start_time)]
        words = ", ".join(w.text for w in undo.processes)
        return Probe(None, f"{words} lives, and may have been killed") if alive else Probe(True, f"{words} has ended")

    def by_hand(self, undo: KillUndo) -> list[str]:
        return ["# start the coordinator again with the same --store"]


class CoordinatorFreeze(Standstill):
    spec = SPECS["coordinator-freeze"]

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return _refusal(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> StoppedUndo:
        return StoppedUndo((machine.coordinator(),))

    def by_hand(self, undo: StoppedUndo) -> list[str]:
        return [f"kill -CONT {w.pid}   # the coordinator, if it is still that process" for w in undo.processes]
