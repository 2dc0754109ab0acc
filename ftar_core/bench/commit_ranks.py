"""Simulated ranks for `bench commit`: thousands in one process, each with a socket of its own and the real messages.

A rank does nothing but report that a step is reduced and take orders. It speaks to its leader as `runtime/follower.py`
does, or, where replicas have one rank, to the coordinator as a member does. When an order has reached a rank is the
kernel's word (SO_TIMESTAMPNS, socket(7): when the last bytes arrived in the socket's buffer; over a Unix socket the
leader's, commit_stamps.py), not when this process came to read it: in a job every rank has a core of its own, here they
share what the coordinator and the leaders leave over, and run when nobody else wants to (SCHED_IDLE, sched(7)).

Lines of JSON in (commands) and out (what was measured). Times are CLOCK_REALTIME seconds, as the kernel's stamps are.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ftar_core.bench.limits import raise_descriptors
from ftar_core.bench.orphan import end_with_parent
from ftar_core.protocol.events import StepReduced
from ftar_core.runtime.nearby import dial_near, is_near
from ftar_core.runtime.team import report_of
from ftar_core.wire import heartbeat
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FRAME_LIMIT, STRANGER_LIMIT, FrameParser, encode, from_coordinator, nonce, prove
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import (
    Catchup,
    CaughtUp,
    Challenge,
    Commit,
    Done,
    Endpoint,
    EpochInfo,
    Hello,
    Join,
    Knock,
    NewEpoch,
    Prepare,
    Prepared,
    RankInfo,
    Report,
    Welcome,
)
from ftar_core.wire.team import (
    PURPOSE_HELLO,
    CommitOrder,
    EnterOrder,
    FollowOrder,
    PrepareOrder,
    RankHello,
    RankLeaves,
    RankReady,
    RankShadow,
    TeamChallenge,
    Welcomed,
    from_leader,
)

JOB, DIGEST, WEIGHT = "bench", 7, 1.0
SO_TIMESTAMPNS = 35
STAMP = struct.Struct("qq")
READ_BYTES = 64 * 1024
TICK_S = 0.01  # heartbeats of an interval are spread over it in slices
RAILS = 2
CONNECTS_A_TURN = 16


def info(replica: str, rank: int) -> RankInfo:
    """Addresses as a node with two rails has them; nobody connects to them here."""
    number = int(replica[1:])
    at = tuple(Endpoint(rail=f"rail{n}", addr=f"10.{n}.{number % 250}.{rank % 250}", port=40000) for n in range(RAILS))
    return RankInfo(rank=rank, node=f"{replica}-node{rank // 8}", links=at, state=at)


@dataclass(eq=False)
class Rank:
    replica: str
    number: int
    solo: bool  # a replica of its own, connected to the coordinator
    sock: socket.socket
    parser: FrameParser[Any]
    address: tuple[str, int]
    step: int = 0  # that it works on; 0: not told yet
    epoch: EpochId = NO_EPOCH
    shadow: bool = False
    beat: tuple[bytes, tuple[str, int]] | None = None


@dataclass
class _Out:
    """An order that is being handed out: how many here have not got it, and when the last one did."""

    value: object
    missing: int
    last: float = 0.0


class Ranks:
    """All ranks of this process. `period_s`: they report together at whole multiples of it. `near`: they use their
    leader's Unix socket, as ranks on its node do."""

    def __init__(
        self,
        token: bytes,
        coordinator: tuple[str, int],
        size: int,
        period_s: float,
        seed_state: str,
        *,
        near: bool,
    ) -> None:
        self._token, self._coordinator, self._size, self._period_s = token, coordinator, size, period_s
        self._near = near and size > 1
        self._state = seed_state
        self._poll = select.epoll()
        self._ranks: dict[int, Rank] = {}
        self._by_replica: dict[str, list[Rank]] = {}
        self._to_connect: deque[tuple[str, int, tuple[str, int]]] = deque()
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._interval_s = 0.1
        self._tick, self._tick_at = 0, time.time()
        self._known: tuple[bytes, Any] = (b"", None)  # the latest order, as it came: most ranks get the same bytes
        self._step, self._report_at = 0, 0.0
        self._reported: tuple[int, float] = (0, 0.0)  # step, when its last report was sent
        self._out: dict[str, _Out] = {}
        self._beats = 0
        self._idle = False  # not before all is connected
        self._input = b""
        os.set_blocking(0, False)
        self._poll.register(0, select.EPOLLIN)

    # --- the loop

    def run(self) -> None:
        while True:
            wait_s = self._tick_at - time.time()
            if self._report_at:
                wait_s = min(wait_s, self._report_at - time.time())
            if self._to_connect:
                wait_s = 0.0
                self._connect_some()
            for descriptor, _ in self._poll.poll(max(0.0, wait_s), 512):
                rank = self._ranks.get(descriptor)
                if rank is not None:
                    self._readable(rank)
                elif descriptor == 0 and not self._commands():
                    return
            now = time.time()
            if self._report_at and now >= self._report_at:
                self._report()
            if now >= self._tick_at:
                self._send_beats(now)

    def _commands(self) -> bool:
        """False: the parent wants no more."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "connect" in command:
                for replica, host, port in command["connect"]:
                    self.connect(replica, (host, port))
            elif "lose" in command:
                self._lose(command["lose"])
            elif "shadow" in command:
                self._shadow_at(command["shadow"], command["step"], epoch_of(command["epoch"]))
        return True

    def _say(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    # --- connections

    def connect(self, replica: str, address: tuple[str, int]) -> None:
        """All ranks of a replica but its leader; or the one that it has, with `address` the coordinator's."""
        for number in range(1, self._size) if self._size > 1 else (0,):
            self._to_connect.append((replica, number, address))

    def _connect_some(self) -> None:
        """A few at a time, so that those who are asked for the token answer in time."""
        for _ in range(min(CONNECTS_A_TURN, len(self._to_connect))):
            replica, number, address = self._to_connect.popleft()
            sock = self._dial(address)
            decoder: Any = from_leader if self._size > 1 else from_coordinator
            rank = Rank(replica, number, self._size == 1, sock, FrameParser(decoder, FRAME_LIMIT), address)
            self._ranks[sock.fileno()] = rank
            self._by_replica.setdefault(replica, []).append(rank)
            self._poll.register(sock.fileno(), select.EPOLLIN)

    def _dial(self, address: tuple[str, int]) -> socket.socket:
        near = dial_near(Address(*address)) if self._near else None
        if near is not None:
            return near
        sock = socket.create_connection(address, timeout=30)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        return sock

    def _lose(self, replica: str) -> None:
        ranks = self._by_replica.pop(replica, [])
        at = time.time()
        for rank in ranks:
            self._forget(rank)
        self._say(lost=replica, at=at)

    def _forget(self, rank: Rank) -> None:
        if self._ranks.pop(rank.sock.fileno(), None) is not None:
            self._poll.unregister(rank.sock.fileno())
            rank.sock.close()
            mates = self._by_replica.get(rank.replica)
            if mates is not None and rank in mates:
                mates.remove(rank)

    def _readable(self, rank: Rank) -> None:
        try:
            data, ancillary, _, _ = rank.sock.recvmsg(READ_BYTES, 64)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._forget(rank)
            if rank.beat is None:  # not taken in: a rank tries again
                self._to_connect.append((rank.replica, rank.number, rank.address))
            return
        at = 0.0 if is_near(rank.sock) else time.time()
        for level, kind, stamp in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = STAMP.unpack(stamp)
                at = seconds + nanoseconds / 1e9
        if data == self._known[0] and not rank.parser.begun:
            self._order(rank, self._known[1], at)
            return
        messages = rank.parser.feed(data)
        if len(messages) == 1 and not rank.parser.begun:
            self._known = (data, messages[0])
        for message in messages:
            self._order(rank, message, at)

    def _send(self, rank: Rank, message: msgspec.Struct) -> None:
        self._send_frame(rank, encode(message))

    def _send_frame(self, rank: Rank, frame: bytes) -> None:
        try:
            sent = rank.sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # its leader was killed; the reader finds out
        if sent < len(frame):  # a full buffer: rare, and short
            rank.sock.setblocking(True)
            rank.sock.sendall(frame[sent:])
            rank.sock.setblocking(False)

    # --- orders

    def _order(self, rank: Rank, message: Any, at: float) -> None:
        match message:
            case CommitOrder(commit):
                self._committed(rank, commit, at)
            case Commit():
                self._committed(rank, message, at)
                if message.next is not None:
                    self._enter(rank, message.next, message.step + 1, at)
            case EnterOrder(epoch=epoch, step=step) | NewEpoch(epoch=epoch, step=step) | Join(epoch=epoch, step=step):
                self._enter(rank, epoch, step, at)
            case PrepareOrder(epoch):
                self._send(rank, RankReady(epoch=epoch.id))
            case Prepare(epoch=epoch):
                self._send(rank, Prepared(epoch=epoch.id))
            case FollowOrder() | Catchup():
                if not rank.shadow:
                    rank.shadow = True
                    if rank is self._by_replica[rank.replica][-1]:
                        self._say(follows=rank.replica)
            case Welcomed(cookie, port, interval_ms, _):
                self._interval_s = interval_ms / 1000
                rank.beat = self._beat(rank, cookie), (rank.address[0], port)
            case Welcome():
                self._interval_s = message.heartbeat_interval_ms / 1000
                rank.beat = self._beat(rank, message.cookie), (self._coordinator[0], message.heartbeat_port)
            case TeamChallenge():
                proof = prove(self._token, PURPOSE_HELLO, JOB, message.nonce)
                self._send(
                    rank,
                    RankHello(
                        job=JOB,
                        replica=rank.replica,
                        world_size=self._size,
                        info=info(rank.replica, rank.number),
                        plan="plan",
                        state="state",
                        last_step=0,
                        nonce=nonce(),
                        proof=proof,
                    ),
                )
            case Challenge():
                self._hello(rank, message)

    def _hello(self, rank: Rank, challenge: Challenge) -> None:
        hello = Hello(
            job=JOB,
            replica=rank.replica,
            incarnation=0,
            ranks=(info(rank.replica, 0),),
            plan="plan",
            report=Report(step=1, promised=challenge.term, state_digest=self._state),
            client_nonce=nonce(),
            proof=prove(self._token, "member-hello", JOB, challenge.nonce),
        )
        if len(encode(hello)) > STRANGER_LIMIT:
            self._send(rank, Knock(job=JOB, proof=prove(self._token, "member-knock", JOB, challenge.nonce)))
        self._send(rank, hello)

    def _committed(self, rank: Rank, commit: Commit, at: float) -> None:
        if commit.step < rank.step or rank.shadow:
            return
        rank.step = commit.step + 1
        if self._all_have("commit", commit.step, commit.contributors, at):
            reported = self._reported[1] if self._reported[0] == commit.step else 0.0
            epoch = commit.epoch
            self._say(
                step=commit.step,
                reported=reported,
                has=self._out["commit"].last,
                seen=time.time(),
                epoch=[epoch.term.number, epoch.term.coordinator, epoch.number],
                beats=self._beats,
                near=self._nearby(),
            )
            self._next(commit.step + 1)

    def _enter(self, rank: Rank, epoch: EpochInfo, step: int, at: float) -> None:
        rank.epoch, rank.step, rank.shadow = epoch.id, step, False
        if self._all_have("epoch", epoch.id, epoch.names(), at):
            if not self._idle:
                self._idle = True
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            self._say(
                entered=epoch.id.number,
                has=self._out["epoch"].last,
                seen=time.time(),
                members=len(epoch.members),
                near=self._nearby(),
            )
            self._next(step)

    def _all_have(self, order: str, value: object, replicas: Sequence[str], at: float) -> bool:
        """True when the last rank here that belongs to one of these replicas has got this."""
        out = self._out.get(order)
        if out is None or out.value != value:
            out = self._out[order] = _Out(value, sum(len(self._by_replica.get(name, ())) for name in replicas))
        out.missing -= 1
        out.last = max(out.last, at)
        return out.missing == 0

    def _nearby(self) -> int:
        """So many ranks are connected by Unix sockets."""
        return sum(is_near(rank.sock) for rank in self._ranks.values())

    def _next(self, step: int) -> None:
        """All here are ready for this step: they report at the next multiple of the period."""
        self._step = step
        self._report_at = (int(time.time() / self._period_s) + 1) * self._period_s

    def _report(self) -> None:
        self._report_at = 0.0
        done: dict[EpochId, bytes] = {}
        last = 0.0
        for rank in list(self._ranks.values()):
            if rank.step != self._step or rank.shadow:
                continue
            frame = done.get(rank.epoch)
            if frame is None:
                frame = done[rank.epoch] = encode(self._done(rank))
            last = time.time()
            self._send_frame(rank, frame)
        self._reported = (self._step, last)

    def _done(self, rank: Rank) -> msgspec.Struct:
        if rank.solo:
            return Done(step=rank.step, epoch=rank.epoch, digest=DIGEST, finite=True, produced_at=time.monotonic())
        reduced = StepReduced(rank.step, rank.epoch, DIGEST, True, produced_at=time.monotonic(), weight=WEIGHT)
        return report_of(reduced) or RankLeaves(reason="not a report", exit_code=1)

    def _shadow_at(self, replica: str, step: int, epoch: EpochId) -> None:
        """A newcomer has the state after `step`: as quick as that, since here there is none."""
        for rank in self._by_replica.get(replica, []):
            if not rank.shadow:
                continue
            if rank.solo:
                self._send(rank, CaughtUp(step=step))
            else:
                self._send(rank, RankShadow(step=step, last_commit_epoch=epoch, ready=True, text=""))
        self._say(ready=replica, at=time.time())

    # --- heartbeats

    def _beat(self, rank: Rank, cookie: bytes) -> bytes:
        phase = heartbeat.Phase.REDUCE
        return heartbeat.FORMAT.pack(heartbeat.MAGIC, heartbeat.VERSION, phase, rank.number, cookie, 1, 1, 1, 1)

    def _send_beats(self, now: float) -> None:
        slices = max(1, round(self._interval_s / TICK_S))
        self._tick = (self._tick + 1) % slices
        self._tick_at = max(self._tick_at + TICK_S, now)
        for rank in list(self._ranks.values())[self._tick :: slices]:
            if rank.beat is not None:
                try:
                    self._udp.sendto(*rank.beat)
                    self._beats += 1
                except OSError:
                    pass  # its leader was killed


def epoch_of(parts: list[Any]) -> EpochId:
    return EpochId(Term(parts[0], parts[1]), parts[2])


def main() -> int:
    spec = json.loads(sys.argv[1])
    end_with_parent(spec["parent"])
    raise_descriptors(spec["descriptors"])
    token = spec["token"].encode()
    host, port = spec["coordinator"]
    Ranks(token, (host, port), spec["ranks"], spec["period_s"], "state", near=spec["near"]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
