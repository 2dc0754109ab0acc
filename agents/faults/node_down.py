"""A node is gone: all its rails and all its training processes at once, as a power loss or a kernel panic would.

The agent and its management NIC stay, or nobody could take it back. While the fault is open the agent starts no replica
(it goes by its ledger, so a watchdog's revert counts as well); afterwards its supervisor starts them as ever.
"""

from __future__ import annotations

import signal

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import nics
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.faults.link_down import LinkDown, LinkDownUndo
from agents.host.errors import HostError
from agents.host.links import find
from agents.host.machine import Machine
from agents.host.processes import send_to, wait_ended
from agents.host.workers import Worker

ENDS_WITHIN_S = 1.0


class NodeDownUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rails: tuple[LinkDownUndo, ...]
    processes: tuple[Worker, ...]


class NodeDown(Fault[NodeDownUndo]):
    spec = SPECS["node-down"]
    undo_type = NodeDownUndo
    privileged = True

    def __init__(self) -> None:
        self._rail = LinkDown()

    def unsupported(self, machine: Machine) -> str:
        return nics.no_right(machine)

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        rails = _rails(machine)
        if not rails:
            return Refusal("refused", f"{target.node} has no rail that is up", "ftctl status")
        refusals = (self._rail.check(machine, Target(target.node, rail), {}) for rail in rails)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def plan(self, machine: Machine, target: Target, params: Params) -> NodeDownUndo:
        rails = tuple(self._rail.plan(machine, Target(target.node, rail), {}) for rail in _rails(machine))
        return NodeDownUndo(rails, machine.workers.all())

    def inject(self, machine: Machine, undo: NodeDownUndo) -> None:
        for rail in undo.rails:
            self._rail.inject(machine, rail)
        sent = [w for w in undo.processes if send_to(w.pid, w.start_time, signal.SIGKILL)]
        for worker in sent:
            wait_ended(worker.pid, worker.start_time, ENDS_WITHIN_S)

    def settled(self, machine: Machine, undo: NodeDownUndo) -> NodeDownUndo:
        return msgspec.structs.replace(undo, rails=tuple(self._rail.settled(machine, rail) for rail in undo.rails))

    def undo(self, machine: Machine, undo: NodeDownUndo) -> str:
        done: list[str] = []
        failed: list[HostError] = []
        for rail in undo.rails:
            try:
                done.append(self._rail.undo(machine, rail))
            except HostError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return "; ".join([*done, "a supervisor may start its replicas again"])

    def probe(self, machine: Machine, undo: NodeDownUndo) -> Probe:
        looks = [self._rail.probe(machine, rail) for rail in undo.rails]
        sentence = ", ".join(look.sentence for look in looks)
        if any(look.in_force for look in looks):
            return Probe(True, sentence)
        return Probe(None if any(look.in_force is None for look in looks) else False, sentence)

    def by_hand(self, undo: NodeDownUndo) -> list[str]:
        return [command for rail in undo.rails for command in self._rail.by_hand(rail)]


def _rails(machine: Machine) -> list[str]:
    known = machine.links.nics()
    found = [(name, find(known, name)) for name in machine.rails]
    return [name for name, nic in found if nic is not None and nic.up and nic.carrier]
