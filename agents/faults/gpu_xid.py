"""An Xid is reported of a GPU. It counts for as long as the fault lasts; a marker file of the agent's own says so.

No program can make a real driver report an Xid. On real GPUs it is therefore said inside this agent only, and no other
health daemon of the node, which might drain or reboot it, hears of it. Simulated GPUs raise it in their driver.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import gpus
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.faults.gpus import StateUndo
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.simgpus import SimulatedGpus, SimulationProblem

FELL_OFF_THE_BUS = 79


class XidUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    marker: str
    gpu: int
    xid: int
    state: StateUndo | None = None  # of simulated GPUs


class GpuXid(Fault[XidUndo]):
    spec = SPECS["gpu-xid"]
    survives_boot = True
    undo_type = XidUndo

    def unsupported(self, machine: Machine) -> str:
        return machine.gpus.why_none()

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return gpus.refusal(machine, target)

    def plan(self, machine: Machine, target: Target, params: Params) -> XidUndo:
        simulated, state = machine.gpus.simulated, None
        if simulated is not None:
            lost = f"gpu.{target.gpu}.lost"
            values: dict[str, str | None] = {lost: "1"} if params["xid"] == FELL_OFF_THE_BUS else {}
            try:
                state = StateUndo(str(simulated.path), values, simulated.look(values))
            except SimulationProblem as error:
                raise HostError("look at the simulated GPUs", 0, str(error)) from None
        marker = machine.scratch / f"xid-{secrets.token_hex(4)}"
        return XidUndo(str(marker), target.gpu, int(params["xid"]), state)

    def inject(self, machine: Machine, undo: XidUndo) -> None:
        try:
            machine.scratch.mkdir(mode=0o700, exist_ok=True)
            Path(undo.marker).touch(mode=0o600)
        except OSError as error:
            raise HostError.of(f"make {undo.marker}", error) from None
        if undo.state is None:
            machine.gpus.report_xid(undo.gpu, undo.xid)
            return
        try:
            SimulatedGpus(Path(undo.state.state)).raise_xid(undo.gpu, undo.xid)
        except SimulationProblem as error:
            raise HostError(f"raise Xid {undo.xid}", 0, str(error)) from None
        if undo.state.values:
            gpus.write(undo.state)

    def undo(self, machine: Machine, undo: XidUndo) -> str:
        try:
            Path(undo.marker).unlink(missing_ok=True)
        except OSError as error:
            raise HostError.of(f"remove {undo.marker}", error) from None
        words = f"Xid {undo.xid} of GPU {undo.gpu} counts no longer"
        if undo.state is not None and undo.state.values:
            words += f"; {gpus.take_back(undo.state)}"
        return words

    def probe(self, machine: Machine, undo: XidUndo) -> Probe:
        there = Path(undo.marker).exists()
        lost = undo.state is not None and bool(undo.state.values) and gpus.in_force(undo.state)
        words = f"Xid {undo.xid} of GPU {undo.gpu} {'counts' if there else 'does not count'}"
        return Probe(there or lost, words + (", which is lost" if lost else ""))

    def by_hand(self, undo: XidUndo) -> list[str]:
        more = gpus.by_hand(undo.state) if undo.state is not None and undo.state.values else []
        return [f"rm {undo.marker}", *more]
