"""End processes with a signal. It cannot be taken back; whoever supervises them starts them again."""

from __future__ import annotations

import signal

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.processes import send_to, state_of, wait_ended
from agents.host.workers import Worker

ENDS_WITHIN_S = 1.0  # the kernel needs up to 0.2 s to take a large process apart


class KillUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    processes: tuple[Worker, ...]
    signal: str


class ProcKill(Fault[KillUndo]):
    spec = SPECS["proc-kill"]
    undo_type = KillUndo
    privileged = True

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return processes.refusal(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> KillUndo:
        return KillUndo(processes.targets(machine, target), str(params["signal"]))

    def inject(self, machine: Machine, undo: KillUndo) -> None:
        number = signal.Signals[f"SIG{undo.signal}"]
        sent = [w for w in undo.processes if send_to(w.pid, w.start_time, number)]
        if not sent:
            raise HostError(f"kill {', '.join(w.text for w in undo.processes)}", 0, "it has just ended by itself")
        for worker in sent:
            wait_ended(worker.pid, worker.start_time, ENDS_WITHIN_S)

    def undo(self, machine: Machine, undo: KillUndo) -> str:
        return "what was ended stays so; its supervisor starts it again"

    def probe(self, machine: Machine, undo: KillUndo) -> Probe:
        alive = [w for w in undo.processes if state_of(w.pid, w.start_time)]
        if not alive:
            return Probe(True, f"{', '.join(w.text for w in undo.processes)} has ended")
        return Probe(None, f"{', '.join(w.text for w in alive)} lives, and may have been sent SIG{undo.signal}")

    def by_hand(self, undo: KillUndo) -> list[str]:
        return ["# nothing: a supervisor starts the processes again"]
