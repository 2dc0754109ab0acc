"""The processes that compute on a GPU stand still (SIGSTOP): what a kernel that never ends looks like from outside."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults import gpus
from agents.faults.contract import Params, Refusal, Target
from agents.faults.processes import STOPPED, Standstill, StoppedUndo
from agents.host.gpus import users_of
from agents.host.machine import Machine
from agents.host.processes import state_of
from agents.host.workers import Worker


class GpuHang(Standstill):
    spec = SPECS["gpu-hang"]
    privileged = False  # a replica's own user may signal it, and only the agent knows the GPUs' processes

    def unsupported(self, machine: Machine) -> str:
        return machine.gpus.why_none()

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        if refused := gpus.refusal(machine, target):
            return refused
        found = self._users(machine, target)
        if not found:
            hint = "ftctl inject proc-hang --replica R stops a replica that you name"
            return Refusal("unknown-replica", f"no replica is known to compute on {target}", hint)
        stopped = [w for w in found if state_of(w.pid, w.start_time) in tuple(STOPPED)]
        return Refusal("refused", f"{stopped[0].text} is stopped already") if stopped else None

    def plan(self, machine: Machine, target: Target, params: Params) -> StoppedUndo:
        return StoppedUndo(self._users(machine, target))

    @staticmethod
    def _users(machine: Machine, target: Target) -> tuple[Worker, ...]:
        return users_of(machine.gpus.pids(target.gpu), machine.workers.all())
