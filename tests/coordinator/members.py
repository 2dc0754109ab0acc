"""Simulated members for tests of the real service: the real Member machine and control loop, an all-reduce in memory.

A `Fabric` stands for the rings: a step is reduced when every member of its epoch has contributed to it, at once and for
all of them, as in a ring of infinite speed. It also stands for the state that a shadow fetches: the committed history.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ftar_core.native import core
from ftar_core.protocol.effects import ApplyCommit, EnterEpoch, FollowSources
from ftar_core.protocol.events import RingReady, ShadowAt, StepReduced
from ftar_core.protocol.member import Member
from ftar_core.runtime.connection import MemberRuntime
from ftar_core.runtime.rails import Rail
from ftar_core.runtime.settings import Settings
from ftar_core.wire.address import Address
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Commit, Endpoint, EpochInfo, Outline, RankInfo
from ftar_core.wire.outline import pack

from .conftest import JOB, TOKEN, poll


@dataclass(frozen=True)
class Committed:
    step: int
    contributors: tuple[str, ...]
    epoch: EpochId


class Fabric:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.contributed: dict[tuple[EpochId, int], dict[str, SimMember]] = defaultdict(dict)
        self.history: dict[int, Committed] = {}
        self.shadows: set[SimMember] = set()

    def contribute(self, member: SimMember, epoch: EpochInfo, step: int) -> None:
        with self.lock:
            if member.frozen:
                return
            there = self.contributed[epoch.id, step]
            there[member.name] = member
            if set(there) != set(epoch.names()):
                return
            del self.contributed[epoch.id, step]
            for each in there.values():
                each.runtime.post(StepReduced(step, epoch.id, digest=step * 7919, finite=True, loss=1 / step))

    def committed(self, commit: Commit) -> None:
        found = Committed(commit.step, commit.contributors, commit.epoch)
        with self.lock:
            known = self.history.setdefault(commit.step, found)
            assert known == found, f"two truths of step {commit.step}: {known} and {found}"
            for shadow in self.shadows:
                shadow.replayed(commit.step, commit.epoch)

    def newest(self) -> Committed | None:
        with self.lock:
            return self.history[max(self.history)] if self.history else None


class SimMember:
    """One life of a replica, as its own session (the delegate). `fresh`: has the initial state; else it must fetch."""

    def __init__(
        self, fabric: Fabric, name: str, port: int, *, fresh: bool = True, beats: bool = True, token: bytes = TOKEN
    ) -> None:
        self.fabric = fabric
        self.name = name
        self.beats = beats
        self.epoch: EpochInfo | None = None
        self.commits: list[Committed] = []
        self.committed_at: list[float] = []
        self.ended: tuple[int, str] | None = None
        self.waits: list[str] = []
        self.entered: list[tuple[float, EnterEpoch]] = []
        self.frozen = False
        self.heartbeat: core.Heartbeat | None = None
        self.runtime = MemberRuntime(
            Settings(
                coordinator=Address("127.0.0.1", port),
                job=JOB,
                replica=name,
                token=token,
                rails=(Rail("lo", "", "127.0.0.1"),),
                node="node-" + name,
            ),
            self,
            Member(JOB, name, time.monotonic(), initial_digest="the same everywhere" if fresh else ""),
        )
        self.runtime.start()

    @property
    def step(self) -> int:
        """The last step it has committed."""
        return self.commits[-1].step if self.commits else 0

    def reach(self, step: int, timeout_s: float = 90.0) -> None:
        poll(lambda: self.step >= step or self.ended is not None, f"{self.name} commits step {step}", timeout_s)
        assert self.step >= step, f"{self.name} ended: {self.ended}"

    def go_on(self, steps: int = 20) -> None:
        """It commits so many more steps."""
        self.reach(self.step + steps)

    def stop(self) -> None:
        self.runtime.close()
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None
        with self.fabric.lock:
            self.fabric.shadows.discard(self)

    def freeze(self) -> None:
        """Contribute nothing more and beat no more, with the connection left open: a paused host, a cut cable."""
        self.frozen = True
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def replayed(self, step: int, epoch: EpochId) -> None:
        self.runtime.post(ShadowAt(step, epoch, ready=True))

    # --- MemberDelegate

    def describe(self) -> tuple[tuple[RankInfo, ...], str, int]:
        here = (Endpoint(rail="lo", addr="127.0.0.1", port=1),)
        return (RankInfo(rank=0, node="node-" + self.name, links=here, state=here),), "plan", 0

    def outline(self) -> Outline:
        return Outline(plans=("plan",), parameters=pack([]))

    def welcomed(self, cookie: bytes, host: str, port: int, interval_ms: int, incarnation: int) -> None:
        if self.beats:
            if self.heartbeat is None:
                self.heartbeat = core.Heartbeat(host, port, cookie, 0, interval_ms)
            else:
                self.heartbeat.retarget(host, port, cookie, interval_ms)

    def prepare_ring(self, epoch: EpochInfo) -> None:
        self.runtime.post(RingReady(epoch.id))

    def discard_ring(self, epoch: EpochId) -> None:
        pass

    def enter_epoch(self, order: EnterEpoch) -> None:
        self.entered.append((time.monotonic(), order))
        self.epoch = order.epoch
        with self.fabric.lock:
            if self in self.fabric.shadows:
                self.fabric.shadows.discard(self)
                self.replayed(order.step - 1, order.last_commit_epoch)
        self.fabric.contribute(self, order.epoch, order.step)

    def apply_commit(self, order: ApplyCommit) -> None:
        commit = order.commit
        self.commits.append(Committed(commit.step, commit.contributors, commit.epoch))
        self.committed_at.append(time.monotonic())
        self.fabric.committed(commit)
        if commit.next is None and not commit.last and self.name not in commit.drained and self.epoch is not None:
            self.fabric.contribute(self, self.epoch, commit.step + 1)

    def follow_sources(self, order: FollowSources) -> None:
        with self.fabric.lock:
            self.fabric.shadows.add(self)
            newest = self.fabric.newest()
            if newest is not None:
                self.replayed(newest.step, newest.epoch)

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def end(self, exit_code: int, reason: str) -> None:
        self.ended = (exit_code, reason)


class CoordinatorProcess:
    """`ftar-coordinator` as a real process."""

    def __init__(
        self, directory: Path, *options: str, port: int = 0, replicas: int = 3, wrap: tuple[str, ...] = ()
    ) -> None:
        self.directory = directory
        for name, text in (("token", TOKEN), ("optoken", b"the token of operators")):
            if not (directory / name).exists():
                (directory / name).touch(mode=0o600)
                (directory / name).write_bytes(text)
        port_file = directory / "port"
        port_file.unlink(missing_ok=True)
        self.log = directory / f"log-{time.monotonic_ns()}"
        arguments = ["--job", JOB, "--replicas", str(replicas), "--store", str(directory / "store"), "--profile", "lab"]
        arguments += ["--token-file", str(directory / "token"), "--operator-token-file", str(directory / "optoken")]
        arguments += ["--listen", f"127.0.0.1:{port}", "--port-file", str(port_file), *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*wrap, sys.executable, "-m", "ftar_core.coordinator", *arguments], stdin=subprocess.DEVNULL, stderr=log
            )
        poll(lambda: port_file.exists() or self.process.poll() is not None, "the coordinator listens")
        assert port_file.exists(), self.text()
        self.port = int(port_file.read_text())

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
