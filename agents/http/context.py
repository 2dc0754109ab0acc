"""What the routes work with, and how they call what may block.

Nothing that touches the kernel, a disk or the network runs on the server's loop. It runs on a small pool of threads, a
pool a kind, with a deadline: a coordinator that hangs uses up its own pool and nobody else's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Generic, Protocol, TypeVar

from agents.api.models import GpuSummary, JobState, LinkProcessView, LinkRow
from agents.audit import AuditLog
from agents.cordon import Cordon
from agents.events import EventLog
from agents.evidence import Evidence
from agents.faults.catalog import CATALOG, AnyFault
from agents.halt import Halt
from agents.health.foreign import Foreigners
from agents.host.errors import HostError
from agents.job import JobRelay
from agents.monitors.links import Counters
from agents.monitors.poller import Poller
from agents.node import Parts
from agents.policy.runner import PolicyRunner
from agents.problems import ApiProblem
from agents.replicas import ReplicaActions
from agents.settings import AgentSettings
from agents.tokens import Tokens
from ftar_core.wire.messages import OpReply

T = TypeVar("T")


def _version() -> str:
    try:
        return metadata.version("ftctl")
    except metadata.PackageNotFoundError:
        return "unknown"


POOL = 8
VERSION = _version()
WAITING = 64  # calls queued or running a pool, before new ones are turned away


class Pool:
    """Threads for one kind of blocking call."""

    def __init__(self, name: str, deadline_s: float, threads: int = POOL, waiting: int = WAITING) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = waiting
        self._waiting = 0

    async def call(self, thing: str, late_code: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """The function's result. Raises what it raises, and ApiProblem `late_code` if it takes too long: it goes on
        behind, so whether it happened is not known."""
        if self._waiting >= self._most:
            raise ApiProblem("failed", thing, f"{self._waiting} requests of this kind are waiting", "try again later")
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._deadline_s)
        except asyncio.TimeoutError:
            raise ApiProblem(late_code, thing, f"not finished within {self._deadline_s:g} s; it goes on") from None

    def _done(self, future: asyncio.Future[T]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # one that came too late has nobody to hear it

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class SharedRead(Generic[T]):
    """Reads that come while one is under way share its answer: a status watched by many, or a coordinator that hangs,
    costs one thread and not one each."""

    def __init__(self) -> None:
        self._running: asyncio.Task[T] | None = None

    async def read(self, start: Callable[[], Coroutine[None, None, T]]) -> T:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(start())
            self._running.add_done_callback(lambda task: None if task.cancelled() else task.exception() and None)
        return await asyncio.shield(self._running)


class Gpus(Protocol):
    def summary(self) -> GpuSummary: ...


class Links(Protocol):
    def views(self) -> list[LinkProcessView]: ...
    def counters(self) -> Counters: ...
    def rows(self, *, pid: int | None, rail: str, state: str, each: bool) -> list[LinkRow]: ...


class Watchdogs(Protocol):
    @property
    def pid(self) -> int | None: ...
    def start(self) -> None: ...


@dataclass(frozen=True)
class Agent:
    """The running agent. `faults` is whether they are allowed here."""

    settings: AgentSettings
    faults: bool
    parts: Parts
    tokens: Tokens
    events: EventLog
    poller: Poller
    gpus: Gpus
    links: Links
    relay: JobRelay
    replicas: ReplicaActions
    cordon: Cordon
    halt: Halt
    evidence: Evidence
    foreigners: Foreigners
    policy: PolicyRunner
    kennel: Watchdogs
    pid: int
    audit: AuditLog
    catalog: Mapping[str, AnyFault] = field(default_factory=lambda: CATALOG)
    started_at: float = field(default_factory=time.monotonic)
    fault_pool: Pool = field(default_factory=lambda: Pool("faults", 18.0))
    audit_pool: Pool = field(default_factory=lambda: Pool("audit", 5.0, 2, 256))
    evidence_pool: Pool = field(default_factory=lambda: Pool("evidence", 15.0))
    job_reads: SharedRead[JobState] = field(default_factory=SharedRead)
    account_reads: SharedRead[OpReply | None] = field(default_factory=SharedRead)
    job_pool: Pool = field(default_factory=lambda: Pool("job", 10.0))

    def start_watchdog(self) -> None:
        """No fault without one. Raises ApiProblem."""
        try:
            self.kennel.start()
        except HostError as error:
            raise ApiProblem("failed", "watchdog", f"nothing was injected: {error}") from None

    def close(self) -> None:
        self.fault_pool.close()
        self.job_pool.close()
        self.evidence_pool.close()
        self.audit_pool.close()
        self.relay.close()
