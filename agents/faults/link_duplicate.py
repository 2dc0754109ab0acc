"""A part of the frames that are sent is sent twice, as a switch does while its tables settle.

The copy passes the same rule as its original, so of N copies a part is doubled again; the kernel ends that by itself.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params, Target
from agents.faults.packets import Rules, RulesUndo, chain, chance, table
from agents.host.machine import Machine


class LinkDuplicate(Rules):
    spec = SPECS["link-duplicate"]

    def plan(self, machine: Machine, target: Target, params: Params) -> RulesUndo:
        percent = float(params["percent"])
        rule = f'{chance(percent)} counter dup to "{target.nic}"'.strip()
        return table([chain(target.nic, "out", [rule])], f"{target.nic} sends {percent:g} % of its frames twice")
