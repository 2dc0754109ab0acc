"""Frames vanish while the carrier stays: a switch that forgot a port, a dead lane, a firewall gone wrong.

Nothing in the kernel tells anybody: only a heartbeat on the rail finds it.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params, Target
from agents.faults.packets import WAYS, Rules, RulesUndo, chain, table
from agents.host.machine import Machine

WORDS = {"in": "all that comes in", "out": "all that is sent", "both": "all that comes in or is sent"}


class LinkBlackhole(Rules):
    spec = SPECS["link-blackhole"]

    def plan(self, machine: Machine, target: Target, params: Params) -> RulesUndo:
        direction = str(params["direction"])
        chains = [chain(target.nic, way, ["counter drop"]) for way in WAYS[direction]]
        return table(chains, f"{target.nic} loses {WORDS[direction]}")
