"""A part of all frames vanishes at random, as on a dirty fibre or a port that overflows."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params, Target
from agents.faults.link_blackhole import WORDS
from agents.faults.packets import WAYS, Rules, RulesUndo, chain, chance, table
from agents.host.machine import Machine


class LinkLoss(Rules):
    spec = SPECS["link-loss"]

    def plan(self, machine: Machine, target: Target, params: Params) -> RulesUndo:
        direction, percent = str(params["direction"]), float(params["percent"])
        chains = [chain(target.nic, way, [f"{chance(percent)} counter drop"]) for way in WAYS[direction]]
        return table(chains, f"{target.nic} loses {percent:g} % of {WORDS[direction]}")
