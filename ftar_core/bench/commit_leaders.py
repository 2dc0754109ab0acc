"""The leaders of `bench commit`: the job's own classes (`runtime/leader.py`, `connection.py`, `pulse.py`, the member
machine), each in a process of its own, forked from one that has everything imported.

A leader's own rank reports at once and has nothing to train. Lines of JSON: commands in, addresses and process ids out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftar_core.bench.commit_ranks import DIGEST, JOB, WEIGHT, epoch_of, info
from ftar_core.bench.commit_stamps import Stamps
from ftar_core.bench.limits import raise_descriptors
from ftar_core.bench.orphan import end_with_parent
from ftar_core.protocol.effects import ApplyCommit, EnterEpoch, FollowSources, TellParts
from ftar_core.protocol.events import RingReady, ShadowAt, StepReduced
from ftar_core.protocol.member import Member
from ftar_core.runtime.leader import TeamLeader
from ftar_core.runtime.pulse import Pulse
from ftar_core.runtime.rails import Rail
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts
from ftar_core.wire.address import Address
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import EpochInfo, Message, Outline
from ftar_core.wire.team import Ballot, CommitOrder, RelayOrder

WAIT_S = 600.0


class StampedLeader(TeamLeader):
    """Notes when a commit was handed to all its ranks."""

    handed: Callable[[int], None]

    def _order(self, message: Message) -> None:
        super()._order(message)
        if isinstance(message, CommitOrder | RelayOrder):
            self.handed(message.commit.step)


class Leader:
    """Rank 0 of one replica: the delegate of its TeamLeader."""

    def __init__(self, replica: str, spec: dict[str, Any]) -> None:
        host, port = spec["coordinator"]
        self._replica = replica
        self._number = int(replica[1:])
        self._stamps = Stamps(Path(spec["stamps"]), spec["replicas"])
        self._epoch: EpochInfo | None = None
        self._pulse = Pulse(0)
        settings = Settings(
            coordinator=Address(host, port),
            job=JOB,
            replica=replica,
            token=spec["token"].encode(),
            rails=(Rail("lo", "", "127.0.0.1"),),
            node=f"{replica}-node0",
            rank=0,
            world_size=spec["ranks"],
        )
        self._team = StampedLeader(
            settings,
            self,
            lambda state: Member(JOB, replica, time.monotonic(), WAIT_S, state),
            info=info(replica, 0),
            facts=RankFacts("plan", "state", 0),
            publish=lambda address: say(leader=replica, host=address.host, port=address.port, pid=os.getpid()),
            pulse=self._pulse,
        )
        self._team.handed = lambda step: self._stamps.committed(self._number, step, time.time())

    def run(self, commands: int) -> None:
        """Until the pipe of commands ends."""
        self._team.start()
        while line := _line(commands):
            command = json.loads(line)
            self._team.post(ShadowAt(command["step"], epoch_of(command["epoch"]), ready=True))

    def _reduce(self, epoch: EpochInfo, step: int) -> None:
        done = StepReduced(step, epoch.id, DIGEST, True, produced_at=time.monotonic(), weight=WEIGHT)
        self._pulse.progress(Phase.REDUCE, 1, 1, 1)
        self._team.post(done)

    # --- RankDelegate

    def tell_parts(self, order: TellParts) -> None:
        """Digests never differ here."""

    def outline(self) -> Outline:
        return Outline(plans=("plan",), parameters=b"")

    def welcomed(self, cookie: bytes, host: str, port: int, interval_ms: int, incarnation: int) -> None:
        self._pulse.beat_to(host, port, cookie, interval_ms)

    def prepare_ring(self, epoch: EpochInfo) -> None:
        self._team.post(RingReady(epoch.id))

    def discard_ring(self, epoch: EpochId) -> None:
        pass

    def enter_epoch(self, order: EnterEpoch) -> None:
        self._stamps.entered(self._number, order.epoch.id.number, time.time())
        self._epoch = order.epoch
        self._reduce(order.epoch, order.step)

    def apply_commit(self, order: ApplyCommit) -> None:
        if self._epoch is not None and order.commit.next is None:
            self._reduce(self._epoch, order.commit.step + 1)

    def follow_sources(self, order: FollowSources) -> None:
        pass

    def restore(self) -> None:
        pass

    def waiting(self, reason: str) -> None:
        pass

    def end(self, exit_code: int, reason: str) -> None:
        say(ended=self._replica, code=exit_code, reason=reason)

    def called(self, number: int) -> None:
        pass

    def agreed(self, number: int, ballots: tuple[Ballot, ...]) -> None:
        pass


def say(**fields: Any) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())  # one write: lines of many processes share the pipe


def _line(descriptor: int) -> bytes:
    """The next line of a blocking pipe; empty at its end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        line += byte
    return line


class Launcher:
    """Forks leaders, hands commands on to them, and ends with its parent; its children end with it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._pipes: dict[str, int] = {}

    def run(self) -> None:
        while line := _line(0):
            command = json.loads(line)
            if "start" in command:
                for replica in command["start"]:
                    self._start(replica)
            elif command.get("replica") in self._pipes:
                os.write(self._pipes[command["replica"]], line)

    def _start(self, replica: str) -> None:
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent(parent)
                os.close(0)
                os.close(writer)
                for pipe in self._pipes.values():
                    os.close(pipe)
                Leader(replica, self._spec).run(reader)
            except BaseException as error:  # noqa: BLE001  the parent is told, whatever it is
                say(ended=replica, code=1, reason=f"{type(error).__name__}: {error}")
            os._exit(0)
        os.close(reader)
        if replica in self._pipes:
            os.close(self._pipes[replica])
        self._pipes[replica] = writer


def main() -> int:
    spec = json.loads(sys.argv[1])
    end_with_parent(spec["parent"])
    raise_descriptors(spec["descriptors"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    Launcher(spec).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
