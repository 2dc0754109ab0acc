"""Some nodes do not hear from some others on any rail: what a failed spine, a wrong VLAN or an access list does.

It is made at the nodes that it is injected on; the peers are known by their addresses. Every rail of the node drops
what comes from them, or goes to them, or both; everything else on the rails goes on.
"""

from __future__ import annotations

import ipaddress

from agents.api.faultspecs import SPECS
from agents.faults import nics
from agents.faults.contract import Params, Refusal, Target
from agents.faults.packets import WAYS, Rules, RulesUndo, chain, table
from agents.host.links import find
from agents.host.machine import Machine

FIELDS = {"in": "saddr", "out": "daddr"}


class Partition(Rules):
    spec = SPECS["partition"]

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        try:
            peers = _addresses(str(params["peers"]))
        except ValueError as error:
            return Refusal("bad-request", f"parameter peers: {error}", "addresses, separated by commas")
        own = {a.address for found in machine.links.all_addresses().values() for a in found}
        mine = [str(peer) for peer in peers if str(peer) in own]
        if mine:
            return Refusal("bad-request", f"{mine[0]} is an address of {target.node} itself", "name other nodes")
        if not _rails(machine):
            return Refusal("refused", f"{target.node} has no rail that is up", "ftctl status")
        return None

    def warning(self, machine: Machine, target: Target) -> str:
        return "; ".join(filter(None, (nics.bypassed(machine, rail) for rail in _rails(machine))))

    def plan(self, machine: Machine, target: Target, params: Params) -> RulesUndo:
        peers, direction = _addresses(str(params["peers"])), str(params["direction"])
        chains = [chain(rail, way, _rules(peers, FIELDS[way])) for rail in _rails(machine) for way in WAYS[direction]]
        words = {"in": "hears nothing from", "out": "sends nothing to", "both": "is cut off from"}
        return table(chains, f"{target.node} {words[direction]} {', '.join(map(str, peers))}")


def _rails(machine: Machine) -> list[str]:
    known = machine.links.nics()
    found = [(name, find(known, name)) for name in machine.rails]
    return [name for name, nic in found if nic is not None and nic.up and nics.PLAIN.match(name)]


def _addresses(text: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Raises ValueError."""
    return [ipaddress.ip_address(part.strip()) for part in text.split(",")]


def _rules(peers: list[ipaddress.IPv4Address | ipaddress.IPv6Address], field: str) -> list[str]:
    v4 = ", ".join(str(peer) for peer in peers if peer.version == 4)
    v6 = ", ".join(str(peer) for peer in peers if peer.version == 6)
    rules = [f"arp {field} ip {{ {v4} }} counter drop", f"ip {field} {{ {v4} }} counter drop"] if v4 else []
    return rules + ([f"ip6 {field} {{ {v6} }} counter drop"] if v6 else [])
