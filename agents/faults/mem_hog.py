"""Memory of the node is taken by a process of ours: a leak in a data loader, a neighbour on a shared node."""

from __future__ import annotations

import secrets

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host import memory
from agents.host.machine import Machine


class HogUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str  # on its command line
    mb: int
    leave_mb: int


class MemHog(Fault[HogUndo]):
    spec = SPECS["mem-hog"]
    undo_type = HogUndo

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        wanted, leave = int(params["mb"]), int(params["leave_mb"])
        available = memory.available_mb()
        if available - wanted >= leave:
            return None
        reason = (
            f"{available} MB are available on {target.node}: with {wanted} taken less than {leave} MB would be left"
        )
        return Refusal("refused", reason, "--mb, or --leave-mb")

    def plan(self, machine: Machine, target: Target, params: Params) -> HogUndo:
        return HogUndo(f"ftctl-hog-{secrets.token_hex(6)}", int(params["mb"]), int(params["leave_mb"]))

    def inject(self, machine: Machine, undo: HogUndo) -> None:
        memory.hold(undo.token, undo.mb, undo.leave_mb)

    def undo(self, machine: Machine, undo: HogUndo) -> str:
        return "its memory is free again" if memory.release(undo.token) else "nobody holds memory for it"

    def probe(self, machine: Machine, undo: HogUndo) -> Probe:
        found = memory.holders(undo.token)
        if not found:
            return Probe(False, "nobody holds memory for it")
        pid, _start, mb = found[0]
        return Probe(True, f"process {pid} holds {mb} MB")

    def by_hand(self, undo: HogUndo) -> list[str]:
        return [f"pkill -KILL -f {undo.token}"]
