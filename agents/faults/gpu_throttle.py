"""A GPU runs slower. A simulated one says why, and at which clock; of a real one the power limit is lowered.

The power limit is put back to what it was before, if it still is what the fault made of it.
"""

from __future__ import annotations

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import gpus
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.faults.gpus import StateFault, StateUndo
from agents.host import gpupower
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.simgpus import THROTTLE, SimulatedGpus


class ThrottleUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`state` of a simulated GPU; else power limits in milliwatts, before and while it lasts."""

    state: StateUndo | None = None
    uuid: str = ""
    before_mw: int = 0
    then_mw: int = 0


class _Simulated(StateFault):
    spec = SPECS["gpu-throttle"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        return {"throttle": THROTTLE[str(params["cause"])], "clock_sm": int(params["clock_mhz"])}


class GpuThrottle(Fault[ThrottleUndo]):
    spec = SPECS["gpu-throttle"]
    survives_boot = True  # of simulated ones; a real one's limit is looked at before it is put back
    undo_type = ThrottleUndo

    def __init__(self) -> None:
        self._simulated = _Simulated()

    def unsupported(self, machine: Machine) -> str:
        return machine.gpus.why_none()

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        if machine.gpus.simulated is not None:
            return self._simulated.check(machine, target, params)
        if refused := gpus.refusal(machine, target):
            return refused
        now = gpupower.read(machine.gpus.uuid(target.gpu))
        if self._wanted(now, params) >= now.limit:
            text = f"its power limit is {now.limit / 1000:g} W, and the least that it accepts {now.least / 1000:g} W"
            return Refusal("refused", f"{target} cannot be made slower: {text}", "--power-percent")
        return None

    def plan(self, machine: Machine, target: Target, params: Params) -> ThrottleUndo:
        if machine.gpus.simulated is not None:
            return ThrottleUndo(self._simulated.plan(machine, target, params))
        uuid = machine.gpus.uuid(target.gpu)
        now = gpupower.read(uuid)
        return ThrottleUndo(None, uuid, now.limit, self._wanted(now, params))

    @staticmethod
    def _wanted(now: gpupower.PowerLimit, params: Params) -> int:
        return max(now.least, int(now.limit * float(params["power_percent"]) / 100))

    def inject(self, machine: Machine, undo: ThrottleUndo) -> None:
        if undo.state is not None:
            gpus.write(undo.state)
        else:
            gpupower.write(undo.uuid, undo.then_mw)

    def undo(self, machine: Machine, undo: ThrottleUndo) -> str:
        if undo.state is not None:
            return gpus.take_back(undo.state)
        now = gpupower.read(undo.uuid)
        if now.limit != undo.then_mw:
            return f"its power limit is {now.limit / 1000:g} W, which is not the fault's"
        after = gpupower.write(undo.uuid, undo.before_mw)
        return f"its power limit is {after.limit / 1000:g} W again"

    def probe(self, machine: Machine, undo: ThrottleUndo) -> Probe:
        if undo.state is not None:
            return self._simulated.probe(machine, undo.state)
        try:
            now = gpupower.read(undo.uuid)
        except HostError as error:
            return Probe(None, str(error))
        return Probe(now.limit == undo.then_mw, f"its power limit is {now.limit / 1000:g} W")

    def by_hand(self, undo: ThrottleUndo) -> list[str]:
        if undo.state is not None:
            return gpus.by_hand(undo.state)
        return [f"nvidia-smi -i {undo.uuid} -pl {undo.before_mw / 1000:g}"]
