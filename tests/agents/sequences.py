"""A node in memory whose agent, watchdog, controller and kernel die at any moment, with a real ledger on disk.

The model of what may be seen on it: nothing that no record could take back, nothing that is not ours changed, nothing
left over.

A kill is not an exception that somebody handles: from that call on, nothing that the dead process does reaches the host
or the disk. It may come before a call's effect, or after it and before its answer.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_links import FakeClock, FakeLinks, FakeNft, FakeQdiscs, address, route

from agents.api.words import FaultState
from agents.host.machine import Machine
from agents.host.processes import start_time_of, state_of
from agents.host.qdiscs import TC_H_ROOT, Qdisc
from agents.host.sysfs import Sysfs
from agents.host.workers import Armed, Worker
from agents.injection.deadlines import Deadlines
from agents.injection.guard import Limits
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Entry, Ledger
from agents.injection.problems import FaultProblem
from agents.injection.reverting import Reverter
from agents.injection.watchdog import OVERDUE_S, RETRY_S, Watchdog

RAILS = ("rail0", "rail1", "rail2")
LIMITS = Limits("node1", RAILS, "mgmt0", max_faults=4, max_duration_s=600)
NEVER = 10**9
# Kinds with what they cannot do without.
WISHES: dict[str, dict[str, Any]] = {
    "noop": {},
    "link-down": {},
    "link-flap": {"period_ms": 2000.0},
    "link-blackhole": {},
    "link-loss": {"percent": 5.0},
    "link-corrupt": {"percent": 5.0},
    "link-rate": {"mbit": 100},
    "link-delay": {"delay_ms": 5.0},
    "partition": {"peers": "10.0.0.2, fd00::2"},
    "proc-hang": {},
    "proc-slow": {"percent": 50.0},
    "node-down": {},
    "disk-full": {"mb": 1},
}
ON_NICS = ("link-down", "link-flap", "link-blackhole", "link-loss", "link-corrupt", "link-rate", "link-delay")
ON_REPLICAS = ("proc-hang", "proc-slow")


class Killed(BaseException):
    """This process was killed; nobody may handle it."""


class Fuse:
    """Burns after so many touches of host or disk; the process is dead from then on."""

    def __init__(self) -> None:
        self.left = NEVER
        self.dead = False

    def set(self, touches: int) -> None:
        self.left = touches

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.spend()
        result = call(*args, **kwargs)
        self.spend()
        return result

    def spend(self) -> None:
        if not self.dead and self.left <= 0:
            self.dead = True
        if self.dead:
            raise Killed
        self.left -= 1


class Mortal:
    """Passes calls on to the host for as long as its process lives."""

    def __init__(self, thing: Any, fuse: Fuse) -> None:
        self._thing, self._fuse = thing, fuse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        return (lambda *a, **k: self._fuse.around(found, *a, **k)) if callable(found) else found


class MortalLedger(Ledger):
    """A process may die with an unfinished file on disk, too."""

    def __init__(self, directory: Path, fuse: Fuse) -> None:
        super().__init__(directory)
        self._fuse = fuse

    def write(self, entry: Entry) -> None:
        try:
            self._fuse.spend()
        except Killed:
            (self.directory / f"{entry.id}.new").write_bytes(b'{"version": 1, "id": "f-')
            raise
        super().write(entry)
        self._fuse.spend()

    def remove(self, fault_id: str) -> None:
        self._fuse.around(super().remove, fault_id)


class Processes:
    """Two ranks of a replica; real ones, because a stop is what the kernel says it is."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        self.close()
        self._children = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
        self.known = tuple(Worker("r1", i, c.pid, start_time_of(c.pid) or 0) for i, c in enumerate(self._children))

    def supervise(self) -> None:
        """Somebody starts again what a fault has killed."""
        if any(child.poll() is not None for child in self._children):
            self.start()

    def all(self) -> tuple[Worker, ...]:
        return tuple(w for w in self.known if state_of(w.pid, w.start_time) not in ("", "Z"))

    def tell(self, worker: Worker, message: Any) -> None:
        raise AssertionError("no fault of these speaks with a rank")

    def listens(self, worker: Worker) -> bool:
        return False

    def armed(self, worker: Worker) -> Armed | None:
        return None

    def stopped(self) -> list[int]:
        return [w.pid for w in self.known if state_of(w.pid, w.start_time) in tuple("Tt")]

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._children = []


@dataclass
class Agent:
    fuse: Fuse
    injector: Injector
    deadlines: Deadlines


@dataclass
class Dog:
    """`fuse` of the agent that started it tells it whether that one lives."""

    fuse: Fuse
    watchdog: Watchdog
    of: Fuse


class Host:
    """The node. Every method is one thing that may happen to it; `check` is what must hold after each."""

    def __init__(self, processes: Processes) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ftctl-sequence-", dir=_fast()))
        self.processes = processes
        self.clock = FakeClock()
        self.agent: Agent | None = None
        self.dogs: list[Dog] = []
        self.faults: list[str] = []
        self._boots = 1
        self._build()
        self.start_agent()

    def _build(self) -> None:
        """The network as the system sets it up at boot."""
        self.links, self.nft, self.qdiscs = FakeLinks(), FakeNft(), FakeQdiscs()
        for name in (*RAILS, "mgmt0"):
            nic = self.links.add(name)
            self.links.addrs[nic.index] = [address(f"10.0.{nic.index}.1/24"), address(f"fd00:{nic.index}::1/64")]
            gateway = f"10.0.{nic.index}.2"
            self.links.table.append(route(f"10.{80 + nic.index}.0.0/16", nic.index, gateway=gateway))
        self.nft.tables["filter"] = "table netdev filter {}"
        self.qdiscs.roots[5] = Qdisc("fq", 0x10000, TC_H_ROOT)
        self.before = {**self.picture(), "scratch": [], "processes": []}

    def _machine(self, fuse: Fuse, **more: Any) -> Machine:
        return Machine(
            scratch=self.directory / "scratch",
            links=Mortal(self.links, fuse),  # type: ignore[arg-type]
            sysfs=Sysfs(self.directory / "sys"),
            clock=self.clock,
            netns=1,
            net_admin=True,
            nft=Mortal(self.nft, fuse),  # type: ignore[arg-type]
            qdiscs=Mortal(self.qdiscs, fuse),  # type: ignore[arg-type]
            rails=RAILS,
            **more,
        )

    # --- what happens ---------------------------------------------------------------------------------------------

    def start_agent(self, dies_after: int = NEVER) -> None:
        """In place of one that is dead, or beside nobody. A new one takes back what it finds."""
        if self.agent is not None:
            return
        fuse = Fuse()
        fuse.set(dies_after)
        ledger = MortalLedger(self.directory / "ledger", fuse)
        machine = self._machine(fuse, workers=self.processes)
        reverter = Reverter(ledger, machine, sleep=lambda _s: None)
        injector = Injector(ledger, machine, LIMITS, lambda *_: None, reverter=reverter)
        self.agent = Agent(fuse, injector, Deadlines(injector, lambda *_: None, "node1"))
        self.dogs.append(self._dog(fuse))
        self._alive(injector.start)

    def _dog(self, of: Fuse) -> Dog:
        fuse = Fuse()
        ledger = MortalLedger(self.directory / "ledger", fuse)
        machine = self._machine(fuse)
        reverter = Reverter(ledger, machine, sleep=lambda _s: None)
        return Dog(fuse, Watchdog(ledger, machine, reverter), of)

    def _alive(self, call: Callable[..., Any], *args: Any) -> Any:
        """None if the agent is dead, or dies meanwhile, or refuses."""
        if self.agent is None:
            return None
        try:
            return call(*args)
        except Killed:
            self.agent = None
        except FaultProblem as problem:
            if problem.code not in ("refused", "unknown-fault"):
                raise
        return None

    def kill_agent(self) -> None:
        if self.agent is not None:
            self.agent.fuse.dead = True
            self.agent = None

    def end_agent(self) -> None:
        """SIGTERM: takes everything back before it goes, and its watchdog with it."""
        if self.agent is None:
            return
        agent = self.agent
        left = self._alive(agent.injector.close)
        if self.agent is not None:
            assert left == []
            self.dogs = [dog for dog in self.dogs if dog.of is not agent.fuse]
            self.kill_agent()

    def kill_dog(self, which: int) -> None:
        """The agent starts another, if it lives."""
        if self.dogs:
            dog = self.dogs.pop(which % len(self.dogs))
            dog.fuse.dead = True
            if not dog.of.dead:
                self.dogs.append(self._dog(dog.of))

    def inject(self, wish: Injection, dies_after: int = NEVER) -> None:
        if self.agent is None:
            return
        self.agent.fuse.set(dies_after)
        entry = self._alive(self.agent.injector.inject, wish)
        if self.agent is not None:
            self.agent.fuse.set(NEVER)
        if entry is not None:
            self.faults.append(entry.id)

    def revert(self, which: int, dies_after: int = NEVER) -> None:
        if self.agent is None or not self.faults:
            return
        self.agent.fuse.set(dies_after)
        entry = self._alive(self.agent.injector.revert, self.faults[which % len(self.faults)], "by hand")
        if self.agent is not None:
            self.agent.fuse.set(NEVER)
            assert entry is None or not entry.open, entry

    def keep_alive(self, which: int) -> None:
        """Of a controller that lives. One that was killed says nothing any more."""
        if self.agent is not None and self.faults:
            self._alive(self.agent.injector.keep_alive, self.faults[which % len(self.faults)])

    def pass_time(self, seconds: float, dies_after: int = NEVER) -> None:
        """Everybody who lives looks at the clock. `dies_after` is of whoever acts first."""
        self.clock.boot += seconds
        self.clock.wall += seconds
        self.processes.supervise()
        if self.agent is not None:
            self.agent.fuse.set(dies_after)
            self._alive(self.agent.deadlines.tick)
            if self.agent is not None:
                self.agent.fuse.set(NEVER)
        self._dogs_look(dies_after if self.agent is None else NEVER)
        if self.agent is None and dies_after != NEVER:
            self.clock.boot += RETRY_S
            self._dogs_look(NEVER)
        self._nothing_overdue()

    def _dogs_look(self, dies_after: int) -> None:
        for dog in list(self.dogs):
            dog.fuse.set(dies_after)
            try:
                left = dog.watchdog.look(agent_lives=not dog.of.dead)
                if dog.of.dead and left == 0:
                    self.dogs.remove(dog)  # nothing left to do
            except Killed:
                self.dogs.remove(dog)
            dog.fuse.set(NEVER)

    def reboot(self) -> None:
        """Nothing in memory is left; the disk is."""
        self.kill_agent()
        for dog in self.dogs:
            dog.fuse.dead = True
        self.dogs = []
        self._boots += 1
        self.clock.id, self.clock.boot = f"boot-{self._boots}", 20.0
        self.processes.start()
        self._build()

    def administrator(self, what: str, number: int) -> None:
        """Somebody else's work on the same node, which must not be touched."""
        if what == "table":
            self.nft.tables[f"admin{number}"] = "table netdev admin {}"
        elif what == "route":
            self.links.table.append(route(f"10.{100 + number}.0.0/16", 5, gateway="10.0.5.2"))
        elif what == "address":
            self.links.addrs[5].append(address(f"10.9.{number}.1/24"))
        elif what == "queue":
            self.qdiscs.roots[5] = Qdisc("htb", (0x20 + number) << 16, TC_H_ROOT)
        elif what == "up":  # of a rail that a fault has set down; only its record knows what was on it
            self.links.set_up(self.links.devices[2 + number % 3], up=True)
            return
        # What is not ours, as it is now; what is ours is compared with the time before.
        now = self.picture()
        kept = {key: value for key, value in self.before.items() if not key.startswith("theirs")}
        self.before = {**kept, **{key: value for key, value in now.items() if key.startswith("theirs")}}

    # --- what must hold -------------------------------------------------------------------------------------------

    def picture(self) -> dict[str, object]:
        """All that a fault could leave behind."""
        seen: dict[str, object] = {"processes": self.processes.stopped()}
        for index, nic in self.links.devices.items():
            whose = "theirs" if nic.name == "mgmt0" else "rail"
            seen[f"{whose} {nic.name}"] = (
                (nic.up, nic.carrier, str(self.qdiscs.roots.get(index))),
                sorted(a.text for a in self.links.addrs[index]),
                sorted(r.text for r in self.links.table if index in r.devices),
            )
        seen["theirs tables"] = sorted(name for name in self.nft.tables if not name.startswith("ftctl_"))
        seen["our tables"] = sorted(name for name in self.nft.tables if name.startswith("ftctl_"))
        scratch = self.directory / "scratch"
        seen["scratch"] = sorted(p.name for p in scratch.iterdir()) if scratch.is_dir() else []
        return seen

    def entries(self) -> list[Entry]:
        content = Ledger(self.directory / "ledger").read()
        assert content.damaged == ()
        return list(content.entries)

    def check(self) -> None:
        """What is not as before is explained by a record on disk that can take it back; what is theirs is as it was."""
        seen = self.picture()
        opened = [entry for entry in self.entries() if entry.open]
        differs = [key for key, value in seen.items() if value != self.before[key]]
        assert not [key for key in differs if key.startswith("theirs")], "somebody else's was touched"
        assert opened or not differs, f"in force, and no record: {differs}"
        known = "\n".join(bytes(entry.undo).decode() for entry in opened)
        for key in differs:
            names = {"processes": self.processes.stopped(), "our tables": seen[key], "scratch": seen[key]}
            for name in names.get(key, [key.removeprefix("rail ")]):  # type: ignore[union-attr]
                assert str(name) in known, f"{key} {name} is in force, and no record knows it"

    def _nothing_overdue(self) -> None:
        """Whoever of the two lives has taken back what is due."""
        if self.agent is None and not self.dogs:
            return
        slack = 0.0 if self.agent is not None else OVERDUE_S
        late = [e for e in self.entries() if e.open and e.due_boot_s() + slack < self.clock.boot]
        assert not late, f"overdue: {late}"

    def finish(self, how: str) -> None:
        """However it ends, everything is as it was before."""
        if how == "time" and self.dogs:
            self.pass_time(LIMITS.max_duration_s + OVERDUE_S)
            self.pass_time(RETRY_S)
        elif how == "end" and self.agent is not None:
            self.end_agent()
        else:
            self.kill_agent()
            self.start_agent()
        assert [e for e in self.entries() if e.open] == []
        assert all(e.state in (FaultState.REVERTED, FaultState.DONE) for e in self.entries())
        assert self.picture() == self.before
        assert how != "anew" or not list((self.directory / "ledger").glob("*.new"))

    def close(self) -> None:
        self.kill_agent()
        for pid in self.processes.stopped():
            os.kill(pid, 18)
        shutil.rmtree(self.directory, ignore_errors=True)


def wish(kind: str, number: int, duration_s: float, dead_man_s: float | None) -> Injection:
    nic = RAILS[number % 3] if kind in ON_NICS else ""
    replica = "r1" if kind in ON_REPLICAS else ""
    rank = number % 3 - 1 if replica else -1
    plain = Injection(kind, "ann", duration_s, nic, replica, rank, params=WISHES[kind], dead_man_s=dead_man_s)
    return dataclasses.replace(plain, allow_last_rail=bool(number % 2), allow_last_replica=True)


def _fast() -> str | None:
    """A file system in memory, where there is one: what is synced here need not survive a power loss."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
