"""The agent of a node: starts the parts in the order in which they need each other, and ends them in the reverse order.

What a predecessor left in force is taken back before anything else. On SIGTERM or SIGINT the faults go first; replicas
stay, unless they are to be stopped, too, because training must survive an upgrade of its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import partial
from pathlib import Path

from agents import tokens
from agents.assembly import IN_FORCE, DaemonProblem, end_after, gpu_monitor, policy_runner, port_monitors
from agents.audit import AuditLog
from agents.breaker import BreakerWatch
from agents.cordon import Cordon
from agents.events import EventLog
from agents.evidence import Evidence
from agents.halt import Halt
from agents.health.desk import HealthDesk
from agents.health.foreign import Foreigners
from agents.health.xidtable import read as xid_table
from agents.helper.remote import RemoteFaults
from agents.helper.split import SplitFaults
from agents.host.kmsg import KernelLine
from agents.host.links import NetlinkLinks
from agents.host.machine import Machine
from agents.host.readiness import Readiness
from agents.host.sysfs import Sysfs
from agents.http.app import make_app
from agents.http.context import Agent
from agents.injection.control import FaultControl
from agents.injection.deadlines import Deadlines
from agents.injection.guard import Limits
from agents.injection.injector import Injector
from agents.injection.kennel import Kennel
from agents.injection.layout import ledger_directory, scratch_directory
from agents.injection.ledger import Ledger
from agents.job import JobRelay
from agents.monitors.foreign import VerdictFiles
from agents.monitors.kernellog import KernelLog
from agents.monitors.linkpoller import LinkPoller
from agents.monitors.poller import Poller
from agents.monitors.xids import XidDesk
from agents.node import Parts
from agents.policy.hands import NodeHands
from agents.recovery.hangwatch import HangWatch
from agents.recovery.ranks import RankRegistry
from agents.recovery.roster import Roster
from agents.recovery.supervisor import Supervisor
from agents.replicas import ReplicaActions
from agents.server import Listeners
from agents.settings import AgentSettings

WATCHDOG_CHECK_S = 2.0


class NodeAgent:
    """`run` goes on until SIGTERM or SIGINT. Raises DaemonProblem."""

    def __init__(
        self, settings: AgentSettings, faults: bool, known: tokens.Tokens, listeners: Listeners, config: Path
    ) -> None:
        self._listeners = listeners
        self._faults = faults
        self._events = EventLog(settings.state_dir / "events.jsonl", settings.node)
        emit = self._events.emit
        self._supervisor = Supervisor(settings, emit) if settings.supervision.replicas else None
        self._registry = RankRegistry(settings.ranks_socket, settings.node) if settings.ranks_socket else None
        relay = JobRelay(settings.coordinator)
        health = HealthDesk(settings.node, emit, rails=settings.rails)
        xids = XidDesk(health, xid_table(settings.xid_table), self._xid_fault)
        self._gpus, gpus = gpu_monitor(settings, xids.seen)
        foreigners = Foreigners(health)
        self._verdict_files = VerdictFiles(settings.verdict_files, health, foreigners)
        log = settings.kernel_log
        self._kernel_log = KernelLog(log, health, xids, self._gpus.at) if log is not None else None
        machine = Machine(
            links=NetlinkLinks(),
            sysfs=Sysfs(settings.sysfs_root),
            scratch=scratch_directory(settings.state_dir),
            rails=tuple(settings.rails),
            coordinator=partial(relay.process, f"agent-{settings.node}"),
            end_agent=end_after,
            workers=Roster(self._supervisor, self._registry),
            gpus=gpus,
            kernel_line=KernelLine(settings.kmsg_device),
        )
        limits = Limits(
            node=settings.node,
            rails=tuple(settings.rails),
            management_nic=settings.management_nic,
            max_faults=settings.max_faults,
            max_duration_s=settings.max_duration_s,
            protection=tuple(filter(None, (settings.protect.of(str(config)),))),
            blast=settings.blast_radius.of(str(config)),
            listen=None if listeners.tcp_address is None else listeners.tcp_address.host,
        )
        ledger = Ledger(ledger_directory(settings.state_dir))
        job = partial(relay.facts, f"agent-{settings.node}")
        local = Injector(ledger, machine, limits, emit, job=job)
        self._halt = Halt(settings.state_dir / "halt.json", settings.node, emit)
        local.halted = self._halt.why
        self._injector: FaultControl = local
        if settings.helper_socket is not None:
            remote = RemoteFaults(
                settings.helper_socket,
                settings.node,
                machine,
                emit,
                job=job,
                halted=self._halt.why,
                elsewhere=local.open_faults,
                limits=limits,
                **({"proof": self._registry.proof} if self._registry is not None else {}),
            )
            self._injector = SplitFaults(local, remote)
        self._cordon = Cordon(settings.state_dir / "cordon.json", settings.node, emit)
        self._deadlines = Deadlines(local, emit, settings.node)
        self._kennel = Kennel(settings.state_dir)
        if self._supervisor is not None:
            self._supervisor.held = self._held
        parts = Parts(settings.node, self._injector, self._supervisor, self._registry, health, tuple(settings.rails))
        nics, rdma = port_monitors(settings, machine, health)
        self._poller = Poller(parts, nics, self._gpus, rdma, poll_s=settings.poll_s, emit=emit)
        self._links = LinkPoller(parts, settings.poll_s, emit)
        evidence = Evidence(parts)
        grace_s = settings.supervision.grace_s
        self._hangs = HangWatch(
            parts, evidence, relay, directory=settings.state_dir / "evidence", grace_s=grace_s, emit=emit
        )
        replicas = ReplicaActions(relay, self._supervisor, grace_s, self._cordon)
        self._policy = policy_runner(
            settings,
            machine,
            NodeHands(
                settings.node,
                {one.replica for one in settings.supervision.replicas},
                machine.workers,
                machine.gpus,
                relay,
                replicas,
                self._cordon,
            ),
            health,
            emit,
        )
        audit = AuditLog(settings.state_dir / "audit.jsonl")
        ask = partial(relay.state, f"agent-{settings.node}")
        self._breaker = BreakerWatch(settings.node, settings.breaker, self._injector, self._halt, ask, audit)
        self._agent = Agent(
            settings=settings,
            faults=faults,
            parts=parts,
            tokens=tokens.TokenFile(settings.tokens_file, known, lambda kind, why: emit(kind, settings.node, why)),
            events=self._events,
            poller=self._poller,
            gpus=self._gpus,
            links=self._links,
            relay=relay,
            replicas=replicas,
            policy=self._policy,
            cordon=self._cordon,
            halt=self._halt,
            evidence=evidence,
            foreigners=foreigners,
            kennel=self._kennel,
            pid=os.getpid(),
            audit=audit,
        )

    def _xid_fault(self, gpu: int) -> str:
        """The open fault that makes Xids of this GPU; empty: none."""
        entries = self._injector.entries()
        return next((e.id for e in entries if e.open and e.kind == "gpu-xid" and e.target.gpu == gpu), "")

    def _held(self) -> str:
        """Why no replica may be started on this node; empty: it may."""
        if why := self._cordon.why():
            return why
        return "a fault keeps this node down" if self._injector.holds_node() else ""

    def run(self, ready: Readiness, *, stop_replicas: bool) -> int:
        node = self._agent.settings.node
        self._injector.start()
        left: list[str] = []
        try:
            if self._faults:
                self._agent.start_watchdog()
            self._deadlines.start()
            if self._faults and self._agent.settings.coordinator is not None:
                self._breaker.start()
            if self._registry is not None:
                self._registry.start()
            if self._supervisor is not None:
                self._supervisor.start()
            self._policy.start()
            self._poller.start()
            self._gpus.start()
            self._verdict_files.start()
            if self._kernel_log is not None:
                self._kernel_log.start()
            where = ", ".join(str(w) for w in (self._listeners.tcp_address, self._agent.settings.unix_socket) if w)
            self._events.emit("agent.started", node, f"pid {os.getpid()}, listens on {where}")
            if self._agent.settings.watch_links:
                self._links.start()
            if self._agent.settings.coordinator is not None and self._registry is not None:
                self._hangs.start()
            asyncio.run(self._serve(ready))
        finally:
            left = self._close(stop_replicas=stop_replicas)
        if left:
            raise DaemonProblem(f"may still be in force: {'; '.join(left)}", IN_FORCE)
        return 0

    async def _serve(self, ready: Readiness) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # a closed terminal is no reason to leave a node
        app = make_app(self._agent)
        watcher = asyncio.create_task(self._keep_watchdog())
        ready.tell()  # its sockets are open: whoever connects from now on is answered
        try:
            await self._listeners.serve(app, stop)
        finally:
            watcher.cancel()

    async def _keep_watchdog(self) -> None:
        while self._faults:
            await asyncio.sleep(WATCHDOG_CHECK_S)
            if self._kennel.pid is None:
                self._events.emit("watchdog.lost", self._agent.settings.node, "it ended; another one is started")
                with contextlib.suppress(Exception):
                    self._agent.start_watchdog()

    def _close(self, *, stop_replicas: bool) -> list[str]:
        """Faults first. Returns those that could not be taken back."""
        self._deadlines.close()
        self._breaker.close()
        left = [f"{entry.id} on {entry.target} ({entry.detail})" for entry in self._injector.close()]
        if not left:
            self._kennel.close()
        self._policy.close()
        self._hangs.close()
        self._poller.close()
        self._gpus.close()
        self._verdict_files.close()
        if self._kernel_log is not None:
            self._kernel_log.close()
        self._links.close()
        if self._supervisor is not None:
            self._supervisor.close(keep_processes=not stop_replicas)
        if self._registry is not None:
            self._registry.close()
        self._agent.close()
        self._events.emit("agent.ended", self._agent.settings.node, "as asked")
        self._events.close()
        return left
