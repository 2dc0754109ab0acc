"""All agents of an inventory, asked at the same time; and the job, asked through any one of them.

One dead agent costs a row and never the answer: `each` returns, for every node, its answer or its error. Job-level
requests need one agent that reaches the coordinator: `any_agent` tries the preferred ones first and goes on to the next
as soon as one fails or is slow, because which agent is alive is exactly what is in doubt when the tool is needed.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from agents.api.models import FaultView, JobState, NodeView
from ftar_core.wire.exits import RankExit
from ftctl import nearest
from ftctl.client.agent import AgentClient, tls_context, transport_of
from ftctl.client.transport import AgentTransport
from ftctl.config import Flags, Inventory, load
from ftctl.context import World
from ftctl.durations import show
from ftctl.errors import AgentRefused, AgentUnreachable, CliError, UsageProblem
from ftctl.exit_codes import ExitCode
from ftctl.options import OutputFormat

T = TypeVar("T")

MAX_CONCURRENT = 256  # agents asked at once; enough to ask 1,000 of them in a few round trips
PATIENCE_S = 0.3  # after this long an agent that has not answered is waited for beside those whose turn it is then
KEPT = 256  # with more agents than that, connections are not kept for the next request
FILES = 64  # descriptors for all but the agents
HEDGE_S = 0.3  # an agent answers in milliseconds; after this long the next one is asked as well
JOB_TRIES = 4  # how many agents are asked for the job: a dead coordinator is dead for all of them


@dataclass(frozen=True)
class NodeAnswer:
    """What one agent said about its node: `view`, or `error`."""

    name: str
    view: NodeView | None
    error: CliError | None


@dataclass(frozen=True)
class Snapshot:
    """The cluster as seen from here, at `time` (Unix seconds): `job` or `job_error`."""

    time: float
    job_name: str
    nodes: tuple[NodeAnswer, ...]
    job: JobState | None
    job_error: CliError | None

    def views(self) -> list[NodeView]:
        return [node.view for node in self.nodes if node.view is not None]

    def faults(self) -> list[FaultView]:
        return [fault for view in self.views() for fault in view.faults]

    def unreachable(self) -> list[str]:
        return [node.name for node in self.nodes if isinstance(node.error, AgentUnreachable)]

    def needs_no_coordinator(self) -> bool:
        """The agents were told of none, and what runs here are processes that need none."""
        return (
            isinstance(self.job_error, AgentRefused)
            and self.job_error.error_code == "no-coordinator"
            and any(process.kind == "nccl" for view in self.views() for process in view.link_processes)
        )

    def finished(self) -> bool:
        """The job has ended as it should: nobody answers for it any more, and every replica that the agents supervise
        ended with the exit code that says so (ftar_core.wire.exits)."""
        processes = [process for view in self.views() for process in view.processes]
        return (
            self.job is None
            and bool(processes)
            and not self.unreachable()
            and all(process.exit_code == RankExit.FINISHED for process in processes)
        )

    def replica_names(self) -> list[str]:
        """Every replica that anybody has heard of: the coordinator, a supervising agent, or a rank's own report."""
        names = {replica.name for replica in self.job.replicas} if self.job else set()
        for view in self.views():
            names |= {process.replica for process in view.processes}
            names |= {rank.replica for rank in view.ranks if rank.job == self.job_name}
        return sorted(names)

    def supervisors(self, replica: str) -> list[str]:
        """Nodes whose agent keeps this replica's processes running."""
        return [view.name for view in self.views() if any(p.replica == replica for p in view.processes)]

    def hosts(self, replica: str) -> list[str]:
        """Nodes that run this replica, those that supervise it first."""
        hosts = self.supervisors(replica)
        hosts += [v.name for v in self.views() if any(r.replica == replica and r.job == self.job_name for r in v.ranks)]
        for state in self.job.replicas if self.job else []:
            if state.name == replica:
                hosts += state.nodes
        return list(dict.fromkeys(hosts))

    def replica(self, text: str) -> str:
        """The replica called `r1` or `JOB/r1`. Raises UsageProblem when nobody knows it."""
        name = short_name(text, self.job_name)
        names = self.replica_names()
        if name in names:
            return name
        known = nearest.among(name, names)
        if missing := self.unreachable():
            known += f"; no answer from {', '.join(missing)}"
        raise UsageProblem(f"replica {name}", f"unknown in job {self.job_name} ({known})", "ftctl status")


def short_name(text: str, job: str) -> str:
    """`r1` of `r1` or `JOB/r1`. Raises UsageProblem when the job is another one."""
    before, slash, name = text.rpartition("/")
    if slash and before != job:
        raise UsageProblem(f"replica {text}", f"this inventory is of job {job}, not {before}")
    if not name:
        raise UsageProblem(f"replica {text!r}", "a name like r1 or JOB/r1 is expected")
    return name


class Agents:
    """Open connections to all agents of an inventory."""

    def __init__(self, world: World, inventory: Inventory, timeout_s: float) -> None:
        self.world = world
        self.inventory = inventory
        self.timeout_s = timeout_s
        self._clients: dict[str, AgentClient] = {}
        self._open: list[AgentTransport] = []
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)
        self._files = asyncio.Semaphore(_files_for(len(inventory.nodes)))
        self._tls = tls_context(inventory)

    async def __aenter__(self) -> Agents:
        return self

    async def __aexit__(self, *_exc: Any) -> None:
        for transport in self._open:
            transport.close()

    async def client(self, node: str) -> AgentClient:
        """Raises UsageProblem when the inventory has no such node."""
        if node not in self._clients:
            entry = self.inventory.node(node)
            keep = len(self.inventory.nodes) <= KEPT
            transport = transport_of(self.inventory, entry, self._tls, keep=keep)
            self._open.append(transport)
            self._clients[node] = AgentClient(entry, transport, self.timeout_s)
        return self._clients[node]

    async def each(
        self,
        ask: Callable[[AgentClient], Awaitable[T]],
        nodes: Iterable[str] | None = None,
        *,
        within_s: float | None = None,
    ) -> dict[str, T | CliError]:
        """Ask several agents (all by default) at the same time. The answers keep the inventory's order.

        An agent that is silent does not use up the turns of the others, however many of them there are. `within_s`: one
        deadline for all of them together; who has not answered then is an error.
        """
        names = list(nodes) if nodes is not None else [node.name for node in self.inventory.nodes]
        patience_s = PATIENCE_S
        if within_s is not None:  # so that everybody is asked in the first half
            patience_s = min(patience_s, within_s / 2 / (1 + len(names) // MAX_CONCURRENT))

        async def one(name: str) -> T | CliError:
            try:
                client = await self.client(name)
                async with self._files, _Turn(self._turns, patience_s):
                    return await ask(client)
            except CliError as error:
                return error

        tasks = {name: asyncio.create_task(one(name)) for name in names}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=within_s)
        finally:
            late = [task for task in tasks.values() if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return {name: _late(name, within_s) if task.cancelled() else task.result() for name, task in tasks.items()}

    async def any_agent(
        self, ask: Callable[[AgentClient], Awaitable[T]], prefer: Iterable[str] = (), *, only_preferred: bool = False
    ) -> T:
        """A question about the job, from the first agent that can answer it. For reads only: it may be asked twice.

        Raises the most telling error when nobody could answer.
        """
        names = self._order(prefer, only_preferred)[:JOB_TRIES]
        waiting: set[asyncio.Task[T]] = set()
        errors: list[CliError] = []

        async def one(name: str) -> T:
            return await ask(await self.client(name))

        try:
            while names or waiting:
                if names:
                    waiting.add(asyncio.create_task(one(names.pop(0))))
                done, waiting = await asyncio.wait(
                    waiting, timeout=HEDGE_S if names else None, return_when=asyncio.FIRST_COMPLETED
                )
                answered: list[asyncio.Task[T]] = []
                for task in done:  # all of them: an exception that nobody looks at is complained of by asyncio
                    error = task.exception()
                    if error is None:
                        answered.append(task)
                    elif isinstance(error, CliError):
                        errors.append(error)
                    else:
                        raise error
                if answered:
                    return answered[0].result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        raise _most_telling(errors)

    async def act(
        self, ask: Callable[[AgentClient], Awaitable[T]], prefer: Iterable[str] = (), *, only_preferred: bool = False
    ) -> T:
        """An action on the job, through one agent after the other until one has accepted or refused it.

        The next agent is tried only when the action surely did not happen: it must never be done twice.
        """
        errors: list[CliError] = []
        for name in self._order(prefer, only_preferred)[:JOB_TRIES]:
            try:
                return await ask(await self.client(name))
            except AgentUnreachable as error:
                if error.indefinite:
                    raise
                errors.append(error)
        raise _most_telling(errors)

    async def snapshot(self) -> Snapshot:
        """Ask all agents for their nodes, and one for the job, all at the same time."""

        async def job() -> JobState | CliError:
            try:
                return await self.any_agent(AgentClient.job)
            except CliError as error:
                return error

        answers, state = await asyncio.gather(self.each(AgentClient.view), job())
        nodes = tuple(
            NodeAnswer(name, None, answer) if isinstance(answer, CliError) else NodeAnswer(name, answer, None)
            for name, answer in answers.items()
        )
        errors = [node.error for node in nodes if isinstance(node.error, AgentRefused)]
        if len(errors) == len(nodes) and all(error.error_code == "unauthorized" for error in errors):
            raise errors[0]  # one sentence about the token says more than a table of the same refusal
        return Snapshot(
            time=self.world.unix_time(),
            job_name=self.inventory.job,
            nodes=nodes,
            job=None if isinstance(state, CliError) else state,
            job_error=state if isinstance(state, CliError) else None,
        )

    def _order(self, prefer: Iterable[str], only_preferred: bool) -> list[str]:
        known = [node.name for node in self.inventory.nodes]
        first = [name for name in dict.fromkeys(prefer) if name in known]
        return first if only_preferred else first + [name for name in known if name not in first]


class _Turn:
    """One of the turns; after `patience_s` it is somebody else's, and we go on beside."""

    def __init__(self, turns: asyncio.Semaphore, patience_s: float) -> None:
        self._turns = turns
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._turns.acquire()
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._give_back)

    async def __aexit__(self, *_exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._give_back()

    def _give_back(self) -> None:
        self._timer = None
        self._turns.release()


def _late(name: str, within_s: float | None) -> AgentUnreachable:
    reason = f"no answer within {show(within_s or 0.0)}, the time for all agents together"
    return AgentUnreachable(name, reason, hint="give it longer with --timeout", indefinite=True)


def _files_for(agents: int) -> int:
    """How many connections may be open at once; the limit of this process is raised where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = agents + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError):
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, wanted - FILES if soft == resource.RLIM_INFINITY else min(agents, soft - FILES))


def _most_telling(errors: list[CliError]) -> CliError:
    """An agent that answered knows more about the job than one that did not."""
    if not errors:
        return CliError("job", "no agent to ask", "ftctl status", ExitCode.UNREACHABLE)
    return next((error for error in errors if not isinstance(error, AgentUnreachable)), errors[0])


class Cluster:
    """What a command gets: the settings, and `run` to talk to the agents."""

    def __init__(self, world: World, flags: Flags) -> None:
        settings = load(world, flags)
        self.world = world
        self.inventory = settings.inventory
        self.output: OutputFormat = settings.output
        self.timeout_s = settings.timeout_s

    def run(self, work: Callable[[Agents], Coroutine[Any, Any, T]]) -> T:
        """Open the connections, do the work, close them."""

        async def session() -> T:
            async with Agents(self.world, self.inventory, self.timeout_s) as agents:
                return await work(agents)

        return self.world.run(session())

    def snapshot(self) -> Snapshot:
        return self.run(Agents.snapshot)
