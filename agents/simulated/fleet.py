"""`ft-agent --simulate N --inventory FILE`: N agents in one process, each of a node that exists only in memory.

What answers is the agent's own application behind a socket each: injection with its guard, ledger and deadlines, halt,
cordon, events and metrics are the real ones, over rails that are not there. Faults of processes, memory and disks are
not offered, since those would be this machine's. For trying tools and habits on a fleet, and for tests of scale.

Sockets and the token are in a directory of the user's own under the temporary one, named after the inventory. Both go
with the process; what a killed one left is replaced by the next with the same inventory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import hashlib
import json
import os
import resource
import secrets
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agents.api.policyfile import read as read_policy
from agents.api.words import Role
from agents.audit import AuditLog
from agents.cordon import Cordon
from agents.events import EventLog
from agents.evidence import Evidence
from agents.faults.catalog import CATALOG
from agents.halt import Halt
from agents.health.desk import HealthDesk
from agents.health.foreign import Foreigners
from agents.host.machine import Machine
from agents.host.sysfs import Sysfs
from agents.http.app import make_app
from agents.http.auth import AGENT
from agents.http.context import Agent, Pool
from agents.injection.deadlines import Deadlines
from agents.injection.guard import Limits
from agents.injection.injector import Injector
from agents.injection.ledger import LedgerError
from agents.job import JobRelay
from agents.monitors.nics import NicMonitor
from agents.monitors.rdma import RdmaMonitor
from agents.node import Parts
from agents.policy.book import PolicyBook
from agents.policy.hands import NodeHands
from agents.policy.runner import PolicyRunner
from agents.recovery.sockets import listen_unix
from agents.replicas import ReplicaActions
from agents.server import BACKLOG, server_for
from agents.settings import AgentSettings
from agents.simulated.memory import AtOnce, LookWhenAsked, MemoryLedger, NoGpus, NoKennel, NoLinks
from agents.simulated.network import SimulatedLinks, SimulatedNft, SimulatedQdiscs
from agents.tokens import Principal, Tokens

MAX_NODES = 10_000
RAILS = ("rail0", "rail1")
MANAGEMENT = "mgmt0"
TICK_S = 0.1
SPARE_FILES = 1200  # connections of clients, and what else a process has open
HEADER = '{"version": 1, "job": "simulated"'  # of an inventory that is ours; JSON, which is quick to read
OFFERED = {kind: fault for kind, fault in CATALOG.items() if fault.target == "nic" or kind in ("noop", "partition")}


POLICY = read_policy()  # shown, and not carried out: nothing here is worth a drain


class FleetProblem(Exception):
    """It cannot be served; the message says why."""


@dataclass(frozen=True)
class Pools:
    """Threads that all nodes share."""

    faults: Pool
    audit: Pool
    evidence: Pool
    job: Pool

    @classmethod
    def made(cls) -> Pools:
        faults, audit = Pool("faults", 18.0, 16, MAX_NODES), AtOnce("audit", 5.0)
        return cls(faults, audit, Pool("evidence", 15.0), Pool("job", 10.0, 16, MAX_NODES))


class SimulatedNode:
    """One agent, without its socket."""

    def __init__(self, directory: Path, name: str, number: int, tokens: Tokens, pools: Pools) -> None:
        settings = AgentSettings(
            node=name,
            state_dir=directory / "state" / name,
            listen=None,
            unix_socket=directory / f"{name}.sock",
            tokens_file=directory / "token",
            rails=list(RAILS),
            management_nic=MANAGEMENT,
            allow_faults=True,
            watch_links=False,
        )
        self.settings = settings
        settings.state_dir.mkdir(mode=0o700, parents=True)
        events = EventLog(None, name)
        machine = Machine(
            scratch=settings.state_dir,
            links=SimulatedLinks((*RAILS, MANAGEMENT), number),
            sysfs=Sysfs(directory / "sys"),
            netns=0,
            nft=SimulatedNft(),
            qdiscs=SimulatedQdiscs(),
            rails=RAILS,
            net_admin=True,
        )
        limits = Limits(name, RAILS, MANAGEMENT, settings.max_faults, settings.max_duration_s)
        ledger = MemoryLedger()
        self.injector = Injector(ledger, machine, limits, events.emit, catalog=OFFERED)
        self.deadlines = Deadlines(self.injector, events.emit, name)
        halt = Halt(None, name, events.emit)
        self.injector.halted = halt.why
        cordon = Cordon(None, name, events.emit)
        health = HealthDesk(name, events.emit, rails=RAILS)
        parts = Parts(name, self.injector, None, None, health, RAILS)
        nics = NicMonitor(machine.links, RAILS, MANAGEMENT)
        health.clears(nics.clear)
        relay = JobRelay(None)
        gpus = NoGpus()
        self.poller = LookWhenAsked(
            ledger,
            parts,
            nics,
            gpus,
            RdmaMonitor(machine.sysfs),
            poll_s=settings.poll_s,
            emit=events.emit,
        )
        replicas = ReplicaActions(relay, None, settings.supervision.grace_s, cordon)
        hands = NodeHands(name, (), machine.workers, machine.gpus, relay, replicas, cordon)
        book = PolicyBook(settings.state_dir / "policy.json", machine.clock.boot_id())
        policy = PolicyRunner(name, POLICY, "default", "observe", book, hands, health, events.emit, machine.clock)
        self.agent = Agent(
            settings=settings,
            faults=True,
            parts=parts,
            tokens=tokens,
            events=events,
            poller=self.poller,
            gpus=gpus,
            links=NoLinks(),
            relay=relay,
            replicas=replicas,
            policy=policy,
            cordon=cordon,
            halt=halt,
            evidence=Evidence(parts),
            foreigners=Foreigners(health),
            kennel=NoKennel(),
            pid=os.getpid(),
            catalog=OFFERED,
            audit=AuditLog(None),
            audit_pool=pools.audit,
            fault_pool=pools.faults,
            evidence_pool=pools.evidence,
            job_pool=pools.job,
        )
        events.emit("agent.started", name, "simulated")


class _For:
    """The one application, asked for one of its agents."""

    def __init__(self, app: ASGIApp, agent: Agent) -> None:
        self._app = app
        self._agent = agent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[AGENT] = self._agent
        await self._app(scope, receive, send)


async def _first_request(app: ASGIApp, agent: Agent) -> None:
    """FastAPI prepares its routes at the first request, for a quarter of a second: not while somebody waits."""
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], AGENT: agent}

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(_message: Message) -> None:
        return

    await app(scope, receive, send)


class Fleet:
    """Raises FleetProblem."""

    def __init__(self, count: int, inventory: Path) -> None:
        if not 1 <= count <= MAX_NODES:
            raise FleetProblem(f"--simulate {count}: 1 to {MAX_NODES} nodes")
        self._count = count
        self._inventory = inventory.absolute()
        self._ended = threading.Event()

    def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        _raise_file_limit(self._count + SPARE_FILES)
        with _directory(self._inventory) as directory, _inventory(self._inventory):
            token = secrets.token_hex(16)
            _write(directory / "token", token + "\n")
            digest = hashlib.sha256(token.encode()).digest()
            tokens = Tokens({digest: Principal("simulated", Role.CHAOS)})
            width = len(str(self._count - 1))
            pools = Pools.made()
            names = [f"sim{number:0{width}}" for number in range(self._count)]
            nodes = [SimulatedNode(directory, name, number, tokens, pools) for number, name in enumerate(names)]
            asyncio.run(self._serve(nodes, directory))

    async def _serve(self, nodes: list[SimulatedNode], directory: Path) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        app = make_app(None)
        await _first_request(app, nodes[0].agent)
        servers, running = [], []
        for node in nodes:
            path = directory / f"{node.settings.node}.sock"
            try:
                sock = listen_unix(path, backlog=BACKLOG)
            except OSError as error:
                raise FleetProblem(f"{path}: {error.strerror}") from None
            node.injector.start()
            node.poller.start()
            server = server_for(_For(app, node.agent), node.settings, tls=False)
            servers.append(server)
            running.append(asyncio.create_task(server.serve(sockets=[sock])))
        keeper = threading.Thread(target=self._keep_deadlines, args=(nodes,), name="fault-deadlines", daemon=True)
        keeper.start()
        _write(self._inventory, _inventory_text(nodes, directory))
        gc.collect()
        gc.freeze()  # a thousand nodes are a million objects, and none of them is garbage before the end
        print(f"{len(nodes)} simulated nodes: ftctl status --inventory {self._inventory}", flush=True)
        try:
            await stop.wait()
        finally:
            for server in servers:
                server.stop()
            await asyncio.gather(*running)
            self._ended.set()

    def _keep_deadlines(self, nodes: list[SimulatedNode]) -> None:
        while not self._ended.wait(TICK_S):
            for node in nodes:
                if node.injector.book.open():
                    with contextlib.suppress(LedgerError):
                        node.deadlines.tick()


def _inventory_text(nodes: list[SimulatedNode], directory: Path) -> str:
    rows = ",\n".join(
        json.dumps({"name": node.settings.node, "url": f"unix://{node.settings.unix_socket}"}) for node in nodes
    )
    return f'{HEADER}, "token_file": {json.dumps(str(directory / "token"))}, "nodes": [\n{rows}\n]}}\n'


@contextlib.contextmanager
def _inventory(path: Path) -> Iterator[None]:
    """Ours to write, and removed at the end. Raises FleetProblem for a file that somebody else wrote."""
    try:
        with path.open("rb") as file:
            if file.read(len(HEADER)) != HEADER.encode():
                raise FleetProblem(f"--inventory {path}: is there already, and was not written by --simulate")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FleetProblem(f"--inventory {path}: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _directory(inventory: Path) -> Iterator[Path]:
    """Of this user alone, empty, and locked: a second fleet with the same inventory is refused."""
    mark = hashlib.sha256(os.fsencode(inventory)).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"ft-fleet-{os.getuid()}-{mark}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise FleetProblem(f"{path}: must be a directory of this user's, mode 0700")
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise FleetProblem(f"{path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FleetProblem(f"--inventory {inventory}: another ft-agent --simulate serves it") from None
        try:
            _empty(path)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write(path: Path, text: str) -> None:
    """Whole or not at all, for the user alone."""
    unfinished = path.with_name(path.name + ".new")
    try:
        unfinished.unlink(missing_ok=True)
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError as error:
        raise FleetProblem(f"{path}: {error.strerror}") from None


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise FleetProblem(f"{wanted} files must be open at once, and {hard} may be (ulimit -Hn)")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
