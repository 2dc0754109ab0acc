"""The demo: three replicas train over two rails each while a rail is unplugged, a replica killed, another drained.

Everything is done through the front door: faults and drains through the agents' API, as `ftctl` does it; only the
SIGKILL is sent by hand, to the pid that the agent shows. What it cost is read from the replicas' journals afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agents.api.models import (
    CoordinatorAction,
    FaultState,
    InjectRequest,
    JobAccount,
    JobState,
    RankView,
    ReplicaAction,
)
from ftctl.client import replicas
from ftctl.client.cluster import Agents, Snapshot
from ftctl.context import World
from ftctl.durations import show
from ftctl.errors import CliError
from ftctl.lab.demo_judge import Mark
from ftctl.lab.journal import read_all
from ftctl.lab.layout import Node
from ftctl.lab.lifecycle import Lab
from ftctl.lab.manifest import MARKER
from ftctl.lab.processes import carries
from ftctl.lab.progress import Progress

CALM_STEPS = 24  # the 20 that stalls are compared with, and a few for the first ones, which are slower
BETWEEN_STEPS = 5
ON_BACKUP_STEPS = 8
WITHIN_S = 30.0  # for anything to happen; what must be quick is judged from the journals, not by giving up here
REJOIN_WITHIN_S = 60.0
POLL_S = 0.15
REASON = "ftctl lab demo"


@dataclass
class Carrier:
    """The witness's reports, as they come."""

    seen: list[tuple[str, float]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self, word: str, after: float, within_s: float) -> float | None:
        """When the carrier went up or down after this time; None if it did not."""
        deadline = time.monotonic() + within_s
        while True:
            found = next((at for said, at in self.seen if said == word and at > after), None)
            if found is not None or time.monotonic() > deadline:
                return found
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), 0.2)
            except asyncio.TimeoutError:
                continue


@asynccontextmanager
async def watch_carrier(lab: Lab, node: Node, rail: str) -> AsyncIterator[Carrier]:
    keeper = lab.keeper()
    if keeper is None or node.name not in keeper.namespaces:
        raise CliError(f"lab {lab.name}", "its keeper is gone", f"ftctl lab down --name {lab.name}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ftctl.lab.carrier", str(keeper.pid), str(keeper.namespaces[node.name]), rail),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, MARKER: lab.manifest.uuid},
        cwd="/",
    )
    carrier = Carrier()

    async def read() -> None:
        assert process.stdout is not None  # noqa: S101 - asked for with PIPE
        async for line in process.stdout:
            word, _, at = line.decode("ascii", "replace").partition(" ")
            carrier.seen.append((word, float(at)))
            carrier.changed.set()

    reader = asyncio.create_task(read())
    try:
        yield carrier
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await asyncio.gather(reader, return_exceptions=True)


class Demo:
    """Plays the scenario on a lab that trains; `marks` says what was done and when."""

    def __init__(self, world: World, lab: Lab, agents: Agents, talk: Progress) -> None:
        self._world, self._lab, self._agents, self._talk = world, lab, agents, talk
        self.marks: list[Mark] = []
        self.account: JobAccount | None = None  # where the time went, shortly before the job ended
        self.replicas = [node.replica for node in lab.nodes]

    async def play(self) -> None:
        """Raises CliError when something does not happen."""
        unplugged, killed, drained = self._lab.nodes[1], self._lab.nodes[2], self._lab.nodes[1]
        await self._steps(CALM_STEPS, "training calmly, to have something to compare with")
        await self._rail_down_and_up(unplugged)
        await self._kill(killed)
        await self._drain_and_rejoin(drained)
        await self._finish()

    # --- a rail -----------------------------------------------------------------------------------------------------

    async def _rail_down_and_up(self, node: Node) -> None:
        snapshot = await self._agents.snapshot()
        rail = self._primary(snapshot, node.replica)
        target = f"{node.name}/{rail}"
        async with watch_carrier(self._lab, node, rail) as carrier:
            if await carrier.next("up", 0.0, 10.0) is None:
                raise CliError(target, "the witness inside the node says nothing of its carrier")
            request = InjectRequest(kind="link-down", nic=rail, duration_s=120.0, reason=REASON)
            asked = time.monotonic()
            client = await self._agents.client(node.name)
            fault = await client.inject(request)
            down = await carrier.next("down", asked, 5.0)
            if down is None:
                raise CliError(target, f"fault {fault.id} is {fault.state.value}, but the carrier stayed up")
            self._talk.done(f"{target} is down ({fault.id})")
            await self._until(lambda s: rail not in self._rails_in_use(s, node.replica), "traffic runs over the backup")
            self._talk.done(f"traffic of {node.replica} runs over the backup")
            await self._steps(ON_BACKUP_STEPS, "training over the backup")
            asked = time.monotonic()
            answer = await client.revert(fault.id)
            if any(view.state is not FaultState.REVERTED for view in answer.faults):
                raise CliError(f"fault {fault.id}", "could not be reverted", "ftctl faults")
            up = await carrier.next("up", asked, 10.0)
            if up is None:
                raise CliError(target, "the fault is reverted, but the carrier did not come back")
            self._talk.done(f"{target} is up again")
            await self._until(lambda s: self._rails_in_use(s, node.replica) == {rail}, f"traffic is back on {rail}")
            seen = time.monotonic()
            self._talk.done(f"traffic of {node.replica} is back on {rail}")
            await self._steps(BETWEEN_STEPS, "training over the primary")
        watchers = tuple(self.replicas)
        self._mark("rail-down", target, node.replica, down, asked, rail=rail, watchers=watchers)
        self._mark("rail-up", target, node.replica, up, time.monotonic(), seen=seen, rail=rail, watchers=watchers)

    def _primary(self, snapshot: Snapshot, replica: str) -> str:
        """The rail that carries what this replica sends."""
        for rank in _ranks(snapshot):
            for link in rank.links:
                if rank.replica == replica and link.direction == "out" and link.active:
                    return link.rail
        raise CliError(f"replica {replica}", "its agent shows no active link", "ftctl ranks")

    def _rails_in_use(self, snapshot: Snapshot, replica: str) -> set[str]:
        """The rails that carry data of this replica's links, as both ends of them say."""
        rails = {
            link.rail
            for rank in _ranks(snapshot)
            for link in rank.links
            if link.active and replica in (rank.replica, link.peer)
        }
        return rails or {"unknown"}

    # --- a replica ----------------------------------------------------------------------------------------------------

    async def _kill(self, node: Node) -> None:
        victim = node.replica
        snapshot = await self._agents.snapshot()
        pid = next((p.pid for view in snapshot.views() for p in view.processes if p.replica == victim), None)
        before = replicas.find(_job(snapshot), victim)
        if pid is None or before is None:
            raise CliError(f"replica {victim}", "its agent shows no process", "ftctl ranks")
        killed = self._sigkill(pid)
        self._talk.done(f"{victim} is killed (pid {pid})")
        life = before.incarnation
        await replicas.until(
            self._agents,
            victim,
            lambda state: state.incarnation > life and state.state == "contributing",
            goal="contributing",
            timeout_s=REJOIN_WITHIN_S,
            on_change=lambda state: self._talk.now(f"{victim} is {state.state}"),
        )
        self._talk.done(f"{victim} was started again, caught up, and contributes")
        await self._steps(BETWEEN_STEPS, "training with all replicas")
        self._mark("replica-killed", victim, victim, killed, time.monotonic())
        # Its new life begins later than the old one ended: what the death cost is not the rejoin's.
        born = max((line.mono for line in read_all(self._lab.paths.journal)[victim].of_kind("start")), default=killed)
        self._mark("replica-rejoined", victim, victim, max(killed, born), time.monotonic())

    def _sigkill(self, pid: int) -> float:
        """Kill this process of the lab; when, on the monotonic clock."""
        try:
            held = os.pidfd_open(pid)
        except OSError as error:
            raise CliError(f"process {pid}", error.strerror or str(error)) from None
        try:
            if not carries(pid, self._lab.manifest.uuid):
                raise CliError(f"process {pid}", "is not of this lab")
            now = time.monotonic()
            signal.pidfd_send_signal(held, signal.SIGKILL)
            return now
        finally:
            os.close(held)

    async def _drain_and_rejoin(self, node: Node) -> None:
        leaver = node.replica
        asked = time.monotonic()
        await self._act("drain", leaver)
        await self._reaches(leaver, "drained")
        self._talk.done(f"{leaver} has left at a step boundary")
        await self._steps(BETWEEN_STEPS, f"training without {leaver}")
        back = time.monotonic()
        self._mark("replica-drained", leaver, leaver, asked, back)
        await self._act("rejoin", leaver)
        await self._reaches(leaver, "contributing")
        self._talk.done(f"{leaver} was started again, caught up, and contributes")
        await self._steps(BETWEEN_STEPS, "training with all replicas")
        self._mark("replica-rejoined", leaver, leaver, back, time.monotonic())

    async def _act(self, verb: str, replica: str) -> None:
        snapshot = await self._agents.snapshot()
        await replicas.act(self._agents, snapshot, verb, replica, ReplicaAction(reason=REASON))

    async def _reaches(self, replica: str, state: str) -> None:
        await replicas.until(
            self._agents,
            replica,
            lambda now: now.state == state,
            goal=state,
            timeout_s=REJOIN_WITHIN_S,
            on_change=lambda now: self._talk.now(f"{replica} is {now.state}"),
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self.account = _job(await self._agents.snapshot()).accounting
        await self._agents.act(lambda client: client.finish(CoordinatorAction(reason=REASON)))
        deadline = time.monotonic() + WITHIN_S
        while True:
            journals = read_all(self._lab.paths.journal)
            running = [name for name in self.replicas if journals[name].last_life_runs()]
            if not running:
                break
            if time.monotonic() > deadline:
                raise CliError(f"replica {running[0]}", f"did not end within {show(WITHIN_S)} of the job's last step")
            await asyncio.sleep(POLL_S)
        self._talk.done("the job has ended")

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _steps(self, count: int, what: str) -> None:
        """Until `count` more steps are committed."""
        first: int | None = None

        def enough(snapshot: Snapshot) -> bool:
            nonlocal first
            step = _job(snapshot).step
            first = step if first is None else first
            self._talk.now(f"{what} (step {step})")
            return step >= first + count

        await self._until(enough, f"{count} more steps")

    async def _until(self, reached: Callable[[Snapshot], bool], what: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while True:
            snapshot = await self._agents.snapshot()
            if snapshot.job is not None and reached(snapshot):
                return
            if time.monotonic() > deadline:
                raise CliError(f"lab {self._lab.name}", f"not seen within {show(WITHIN_S)}: {what}", "ftctl status")
            await asyncio.sleep(POLL_S)

    def _mark(
        self,
        kind: str,
        target: str,
        replica: str,
        start: float,
        end: float,
        *,
        seen: float | None = None,
        rail: str = "",
        watchers: tuple[str, ...] = (),
    ) -> None:
        self.marks.append(Mark(kind, target, replica, start, end, seen, rail, watchers))


def _ranks(snapshot: Snapshot) -> list[RankView]:
    return [rank for view in snapshot.views() for rank in view.ranks if rank.job == snapshot.job_name]


def _job(snapshot: Snapshot) -> JobState:
    if snapshot.job is None:
        raise snapshot.job_error or CliError("job", "no answer from the coordinator")
    return snapshot.job
