"""The agent itself is killed, a moment after it has said so. Whoever supervises it starts it again.

What it had injected is taken back by the watchdog when its time is up, or by the next agent at once.
"""

from __future__ import annotations

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.machine import Machine


class AgentKillUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    after_ms: int


class AgentKill(Fault[AgentKillUndo]):
    spec = SPECS["agent-kill"]
    undo_type = AgentKillUndo

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return None

    def plan(self, machine: Machine, target: Target, params: Params) -> AgentKillUndo:
        return AgentKillUndo(int(params["after_ms"]))

    def inject(self, machine: Machine, undo: AgentKillUndo) -> None:
        machine.end_agent(undo.after_ms / 1000.0)

    def undo(self, machine: Machine, undo: AgentKillUndo) -> str:
        return "the agent is ended, or was"

    def probe(self, machine: Machine, undo: AgentKillUndo) -> Probe:
        return Probe(None, f"the agent is killed within {undo.after_ms} ms")

    def by_hand(self, undo: AgentKillUndo) -> list[str]:
        return ["# nothing: start the agent again"]
