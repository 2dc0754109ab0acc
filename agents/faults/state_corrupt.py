"""Flip one bit of a rank's memory: what nothing reports and only a comparison with the other replicas finds.

The rank does it itself, in its training thread and at a point of a step where what is hit is complete (action `flip` of
ftar_core/wire/breakpoints.py). It listens only if it was started so (FTAR_BREAKPOINTS), as an agent with --allow-faults
starts its replicas; no answer comes back, so the rank's log and the coordinator's event `replica.diverged` are the
proof. A flip cannot be taken back: a replica that is evicted for it, or by hand, fetches the others' state.
"""

from __future__ import annotations

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.machine import Machine
from agents.host.workers import Worker
from ftar_core.wire.agentlink import ArmBreakpoints

POINTS = {"reduced": "reduced", "parameter": "forward", "optimizer": "forward"}


class FlipUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: Worker
    text: str  # as FTAR_BREAKPOINTS would have it


class StateCorrupt(Fault[FlipUndo]):
    spec = SPECS["state-corrupt"]
    undo_type = FlipUndo

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        refusal = processes.refusal(machine, target)
        if refusal is None and not machine.workers.listens(processes.targets(machine, target)[0]):
            worker, hint = processes.targets(machine, target)[0], "start it with FTAR_BREAKPOINTS=allow and FTAR_AGENT"
            return Refusal("refused", f"{worker.text} takes no orders of this kind from its agent", hint)
        return refusal

    def plan(self, machine: Machine, target: Target, params: Params) -> FlipUndo:
        worker = processes.targets(machine, target)[0]  # one bit, in one rank
        where = str(params["where"])
        return FlipUndo(worker, f"{POINTS[where]},action=flip,where={where},seed={int(params['seed'])}")

    def inject(self, machine: Machine, undo: FlipUndo) -> None:
        machine.workers.tell(undo.worker, ArmBreakpoints(text=undo.text))

    def undo(self, machine: Machine, undo: FlipUndo) -> str:
        return f"the bit stays as it is; `ftctl evict replica {undo.worker.replica}` makes it fetch the others' state"

    def probe(self, machine: Machine, undo: FlipUndo) -> Probe:
        return Probe(None, f"{undo.worker.text} was told; its log and `ftctl events` say what came of it")

    def by_hand(self, undo: FlipUndo) -> list[str]:
        return [f"ftctl evict replica {undo.worker.replica}"]
