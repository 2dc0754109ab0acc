"""Slow processes down: stop them for a part of every period, all their threads at once.

A CPU quota of a cgroup would do the same with less work, but a process's cgroup belongs to whoever made it (Slurm, a
container runtime, systemd), and there is no way to give one process a quota without moving it out of there. A stop in
short turns works everywhere, needs nothing but the right to signal, and forgets itself with SIGCONT.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Params, Refusal, Target
from agents.faults.processes import Standstill, StoppedUndo
from agents.faults.rhythm import Rhythm
from agents.host.machine import Machine


class ProcSlow(Standstill):
    spec = SPECS["proc-slow"]

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return processes.refusal(machine, target) or processes.refusal_of_stopped(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> StoppedUndo:
        found = processes.targets(machine, target)
        return StoppedUndo(found, float(params["percent"]), float(params["period_ms"]) / 1000.0)

    def rhythm(self, undo: StoppedUndo) -> Rhythm | None:
        return Rhythm(undo.period_s, undo.percent / 100.0)
