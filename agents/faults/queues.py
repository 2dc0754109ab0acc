"""Faults made of a queueing discipline at the root of a rail (tc(8)); they act on what the rail sends.

Only the kernel's default is replaced, and by removing ours the kernel brings it back. What an administrator put there
is left alone: the fault is refused.
"""

from __future__ import annotations

import secrets

import msgspec

from agents.faults import nics
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.qdiscs import TC_H_ROOT

HELD_PACKETS = 100_000  # by netem; its default of 1,000 would lose most of a fast rail's traffic


class QueueUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ours by its handle. `before`: what the kernel had there, for people."""

    nic: str
    index: int
    mac: str
    netns: int
    kind: str
    handle: int
    options: bytes
    doing: str
    before: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.handle >> 16:x}:"


class Queue(Fault[QueueUndo]):
    """A fault whose `options` are those of a discipline; the rest is here."""

    undo_type = QueueUndo
    privileged = True
    discipline: str

    def options(self, params: Params) -> tuple[bytes, str]:
        """In netlink's form, and in words ("sends at most 100 Mbit/s")."""
        raise NotImplementedError

    def unsupported(self, machine: Machine) -> str:
        return nics.no_right(machine) or machine.qdiscs.unsupported(self.discipline)

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        refusal = nics.refusal(machine, target)
        if refusal is not None:
            return refusal
        nic = nics.planned(machine, target)
        foreign = [q for q in machine.qdiscs.of(nic.index) if q.parent == TC_H_ROOT and q.handle]
        if foreign:
            reason = f"{nic.name} has a queueing discipline of somebody else's ({foreign[0].text}), which stays"
            return Refusal("refused", reason, f"tc qdisc show dev {nic.name}")
        return None

    def warning(self, machine: Machine, target: Target) -> str:
        return nics.bypassed(machine, target.nic)

    def plan(self, machine: Machine, target: Target, params: Params) -> QueueUndo:
        nic = nics.planned(machine, target)
        options, doing = self.options(params)
        return QueueUndo(
            nic=nic.name,
            index=nic.index,
            mac=nic.mac,
            netns=machine.netns,
            kind=self.discipline,
            handle=(0xF000 + secrets.randbelow(0xE00)) << 16,
            options=options,
            doing=f"{nic.name} {doing}",
            before=tuple(q.text for q in machine.qdiscs.of(nic.index)),
        )

    def inject(self, machine: Machine, undo: QueueUndo) -> None:
        nic = nics.same(machine, undo)
        if nic is None:
            raise HostError(f"put {undo.kind} on {undo.nic}", 0, "it has just vanished")
        machine.qdiscs.add_root(nic.index, undo.handle, undo.kind, undo.options, f"put {undo.kind} on {nic.name}")

    def undo(self, machine: Machine, undo: QueueUndo) -> str:
        nic = nics.same(machine, undo)
        if nic is None:
            return f"{undo.nic} does not exist any more: nothing to remove"
        if not self._there(machine, undo, nic.index):
            return f"{undo.name} is not on {nic.name}"
        machine.qdiscs.remove_root(nic.index, undo.handle, f"remove {undo.name} from {nic.name}")
        return f"{undo.name} is removed from {nic.name}"

    def probe(self, machine: Machine, undo: QueueUndo) -> Probe:
        try:
            nic = nics.same(machine, undo)
            there = nic is not None and self._there(machine, undo, nic.index)
        except HostError as error:
            return Probe(None, f"{undo.nic} cannot be looked at: {error}")
        if nic is None:
            return Probe(False, f"{undo.nic} does not exist any more")
        return Probe(there, undo.doing if there else f"{undo.name} is not on {nic.name}")

    def by_hand(self, undo: QueueUndo) -> list[str]:
        return [f"tc qdisc del dev {undo.nic} root   # if it is {undo.name}"]

    def _there(self, machine: Machine, undo: QueueUndo, index: int) -> bool:
        found = machine.qdiscs.of(index)
        return any(q.handle == undo.handle and q.kind == undo.kind and q.parent == TC_H_ROOT for q in found)
