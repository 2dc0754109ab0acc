"""Faults made of packet rules at a rail (nft(8), family netdev): a table of its own for each, gone with it.

The hooks are the first and the last thing in the kernel that a frame meets, so ARP and heartbeats are hit like all else
and tools that look at the device (carrier, counters of the driver, tcpdump on the way in) see nothing wrong.
"""

from __future__ import annotations

import secrets

import msgspec

from agents.faults import nics
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine

WAYS = {"in": ("in",), "out": ("out",), "both": ("in", "out")}
HOOKS = {"in": "ingress", "out": "egress"}
RANDOM_STEPS = 1_000_000


class RulesUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table, all of it ours, and what it does in words."""

    table: str
    ruleset: str
    doing: str


def chance(percent: float) -> str:
    """A match for a part of all packets; empty for all of them."""
    if percent >= 100.0:
        return ""
    return f"numgen random mod {RANDOM_STEPS} < {round(percent / 100.0 * RANDOM_STEPS)}"


def chain(nic: str, way: str, rules: list[str]) -> str:
    body = "".join(f"  {rule};\n" for rule in rules)
    return (
        f" chain {nic.replace('.', '_').replace(':', '_').replace('@', '_')}_{way} {{\n"
        f'  type filter hook {HOOKS[way]} device "{nic}" priority -500; policy accept;\n{body} }}\n'
    )


def table(chains: list[str], doing: str) -> RulesUndo:
    name = f"ftctl_{secrets.token_hex(6)}"
    return RulesUndo(name, f"table netdev {name} {{\n{''.join(chains)}}}\n", doing)


class Rules(Fault[RulesUndo]):
    """A fault whose plan makes a table; the rest is here."""

    undo_type = RulesUndo
    privileged = True

    def unsupported(self, machine: Machine) -> str:
        return nics.no_right(machine) or machine.nft.unsupported()

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return nics.refusal(machine, target)

    def warning(self, machine: Machine, target: Target) -> str:
        return nics.bypassed(machine, target.nic)

    def inject(self, machine: Machine, undo: RulesUndo) -> None:
        machine.nft.load(undo.ruleset, f"make packet rules ({undo.doing})")

    def undo(self, machine: Machine, undo: RulesUndo) -> str:
        there = machine.nft.delete(undo.table)
        return f"packet rules {undo.table} are removed" if there else f"packet rules {undo.table} are not there"

    def probe(self, machine: Machine, undo: RulesUndo) -> Probe:
        try:
            packets = machine.nft.packets(undo.table)
        except HostError as error:
            return Probe(None, f"packet rules cannot be looked at: {error}")
        if packets is None:
            return Probe(False, f"packet rules {undo.table} are not there")
        return Probe(True, f"{undo.doing} ({packets} hit so far)")

    def by_hand(self, undo: RulesUndo) -> list[str]:
        return [f"nft delete table netdev {undo.table}"]
