"""The state of a run that its actions share: agents, journal, what was injected, when which incident began."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from agents.api.models import FaultView, InjectRequest, JobState, NodeView
from agents.api.safety import HitSaid
from ftctl.client import fleet, injection
from ftctl.client.agent import AgentClient
from ftctl.client.cluster import Agents, Snapshot
from ftctl.errors import CliError
from ftctl.playbook.journal import Journal
from ftctl.playbook.pace import Pace
from ftctl.playbook.rules import Rules
from ftctl.playbook.selecting import Aim

KEEPALIVE_S = 2.5


class ActionFailed(CliError):
    """An action of the method did not do what it should."""


@dataclass
class Incident:
    """Something done to the cluster on purpose. Times are the controller's: Unix and monotonic seconds."""

    number: int
    kind: str
    aim: Aim
    repeat: int
    time: float
    mono: float
    fault: str = ""
    reached: float | None = None  # seconds until the agent said that it is in force


@dataclass(frozen=True)
class Asked:
    """A fault of this run: what it hits until then (monotonic seconds); None: nothing any more."""

    hit: HitSaid | None
    until: float


@dataclass
class Run:
    agents: Agents
    journal: Journal
    rng: Random
    say: Callable[[str], None]
    reason: str
    pace: Pace
    rules: Rules = field(default_factory=Rules)
    repeat: int = 0
    began: float = 0.0  # monotonic seconds, of this round of the method
    incidents: list[Incident] = field(default_factory=list)
    named: dict[str, list[str]] = field(default_factory=dict)  # a playbook's name for a fault -> its ids
    live: dict[str, FaultView] = field(default_factory=dict)  # by id: what may be in force
    unknown: list[CliError] = field(default_factory=list)  # injections whose fate nobody knows
    seen: Snapshot | None = None  # the last look at the cluster
    asked: dict[str, Asked] = field(default_factory=dict)  # by request id

    def patience(self, seconds: float) -> float:
        """How long is waited for what a playbook allows so many seconds: longer on a machine that is slow today."""
        return seconds * self.pace.slower

    def begin(self, kind: str, aim: Aim) -> Incident:
        """The incident is written down before it is made."""
        self.pace.disturbed = True
        world = self.agents.world
        incident = Incident(len(self.incidents), kind, aim, self.repeat, world.unix_time(), world.monotonic())
        self.incidents.append(incident)
        self.journal.write(
            "incident",
            number=incident.number,
            what=kind,
            node=aim.node,
            nic=aim.nic,
            replica=aim.replica,
            rank=aim.rank,
            repeat=self.repeat,
        )
        return incident

    async def job(self) -> JobState:
        """Raises CliError."""
        return await self.agents.any_agent(AgentClient.job)

    async def snapshot(self) -> Snapshot:
        self.seen = await self.agents.snapshot()
        return self.seen

    def telling(self, request: InjectRequest, node: str) -> InjectRequest:
        """With what is in force elsewhere: by the last look at the cluster, and what this run has asked for."""
        views = {one.name: one.view for one in self.seen.nodes} if self.seen is not None else {}
        if not fleet.knows_limits(views.get(node)):
            return request
        now = self.agents.world.monotonic()
        others = {name: view and self._without_ours(view) for name, view in views.items()}
        ours = [one.hit for one in self.asked.values() if one.hit is not None and now < one.until]
        told = request.model_copy(update={"fleet": fleet.said(others, ours)})
        self.asked[request.request_id] = Asked(fleet.of_request(request, node, views[node]), now + request.duration_s)
        return told

    def _without_ours(self, view: NodeView) -> NodeView:
        """What this run has made is known better here than by a look that may be older."""
        return view.model_copy(update={"faults": [f for f in view.faults if f.request_id not in self.asked]})

    def over(self, request_id: str) -> None:
        """It hits nothing any more, or never did."""
        if (one := self.asked.get(request_id)) is not None:
            self.asked[request_id] = replace(one, hit=None)

    def took(self, outcome: injection.Outcome) -> None:
        """Note what may be in force."""
        for fault in outcome.faults.values():
            if fault.irreversible:
                self.over(fault.request_id)  # the coordinator knows who is gone
            else:
                self.live[fault.id] = fault
        self.unknown += [injection.in_doubt(node, request) for node, request in outcome.unknown.items()]

    async def keep_alive(self) -> None:
        """Until cancelled: tell the agents that this controller lives."""
        while True:
            await asyncio.sleep(KEEPALIVE_S)

            async def tell(fault: FaultView) -> None:
                try:
                    client = await self.agents.client(fault.node)
                    await client.keepalive(fault.id)
                except CliError:
                    pass  # it is over, which the clean-up will find; or the agent is away: its watchdog takes it back

            await asyncio.gather(*(tell(fault) for fault in list(self.live.values())))

    async def revert(self, ids: list[str] | None = None) -> list[CliError]:
        """Take back the faults of this run (all, or these). The errors name what may still be in force."""
        wanted = [fault for fault in self.live.values() if ids is None or fault.id in ids]
        errors: list[CliError] = []

        async def undo(fault: FaultView) -> None:
            failed = await injection.take_back(self.agents, injection.Outcome(faults={fault.node: fault}))
            errors.extend(failed)
            if not failed:
                self.live.pop(fault.id, None)
                self.over(fault.request_id)

        await asyncio.gather(*(undo(fault) for fault in wanted))
        self.journal.write(
            "action",
            what="revert",
            faults=[fault.id for fault in wanted],
            errors=[str(error) for error in errors],
        )
        return errors
