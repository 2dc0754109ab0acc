"""Rank 0 and the others over real sockets: how they find each other, who is turned away, what a broken one costs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftar_core.errors import NotAssembled, SettingsError
from ftar_core.protocol.effects import Wait
from ftar_core.protocol.events import LeaveNow, Received, StepReduced
from ftar_core.runtime import assembly
from ftar_core.runtime import follower as follower_module
from ftar_core.runtime.assembly import listen
from ftar_core.runtime.follower import TeamFollower
from ftar_core.runtime.leader import TeamLeader
from ftar_core.runtime.rails import Rail
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FrameParser, encode, nonce, prove
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import NO_EPOCH, EpochId
from ftar_core.wire.messages import Deal, EpochInfo, Hold, NewEpoch, RankInfo
from ftar_core.wire.team import Ballot, FromLeader, RankHello, TeamChallenge, TeamWelcome, WaitOrder, from_leader

from .test_member_connection import TERM, TOKEN, Coordinator, Delegate, Machine

FACTS = RankFacts("plan", "state", 0)


class Rank(Delegate):
    def called(self, number: int) -> None:
        self.note("called", number)

    def agreed(self, number: int, ballots: tuple[Ballot, ...]) -> None:
        self.note("agreed", (number, ballots))


class Replica:
    """A leader and its coordinator; the ranks come as the test wants. `common`: settings of all ranks."""

    def __init__(self, size: int = 2, **common: Any) -> None:
        self.size, self.common = size, common
        self.coordinator = Coordinator()
        self.machine = Machine()
        self.address: Address | None = None
        self.published = threading.Event()
        self.rank0 = Rank()
        self.states: list[str] = []
        self.leader = TeamLeader(
            self.settings(0), self.rank0, self.make, info=info(0), facts=FACTS, publish=self.publish
        )
        self.failure: Exception | None = None
        self.open: list[Any] = [self.leader]

    def make(self, state: str) -> Machine:
        self.states.append(state)
        return self.machine

    def publish(self, address: Address) -> None:
        self.address = address
        self.published.set()

    def settings(self, rank: int, **fields: Any) -> Settings:
        given: dict[str, Any] = {
            "coordinator": Address("127.0.0.1", self.coordinator.port),
            "job": "demo",
            "replica": "r0",
            "token": TOKEN,
            "rails": (Rail("lo", "", "127.0.0.1"),),
            "node": "n",
            "rank": rank,
            "world_size": self.size,
            **self.common,
            **fields,
        }
        return Settings(**given)

    def find(self) -> Address:
        assert self.published.wait(60)
        assert self.address is not None
        return self.address

    def start_leader(self) -> threading.Thread:
        def run() -> None:
            try:
                self.leader.start()
            except Exception as error:
                self.failure = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def follower(self, rank: int, facts: RankFacts = FACTS, **fields: Any) -> tuple[TeamFollower, Rank]:
        delegate = Rank()
        made = TeamFollower(self.settings(rank, **fields), delegate, info=info(rank), facts=facts, find=self.find)
        self.open.append(made)
        return made, delegate

    def together(self) -> list[tuple[TeamFollower, Rank]]:
        starting = self.start_leader()
        ranks = [self.follower(rank) for rank in range(1, self.size)]
        for follower, _ in ranks:
            follower.start()
        starting.join(60)
        self.coordinator.accept()
        self.coordinator.welcome()
        return ranks

    def close(self) -> None:
        for one in self.open:
            one.close()
        self.coordinator.close()


def info(rank: int) -> RankInfo:
    return RankInfo(rank=rank, node="n", links=(), state=())


@pytest.fixture(params=["unix", "tcp"])
def replica(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replica]]:
    """The same must hold whichever way the ranks reach their leader."""
    made: list[Replica] = []
    if request.param == "tcp":
        monkeypatch.setattr(follower_module, "dial_near", lambda _address: None)

    def make(size: int = 2) -> Replica:
        made.append(Replica(size))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_job_hears_of_a_replica_when_all_its_ranks_are_here(replica: Callable[..., Replica]) -> None:
    r = replica(3)
    starting = r.start_leader()
    (late, _), (early, _) = r.follower(1), r.follower(2)
    early.start()
    time.sleep(0.05)
    assert starting.is_alive()
    late.start()
    starting.join(60)
    r.coordinator.accept()
    hello = r.coordinator.welcome()
    assert [rank.rank for rank in hello.ranks] == [0, 1, 2]
    assert hello.plan != FACTS.plan, "it is the plan of all three"
    assert r.states
    assert r.states[0] not in ("", FACTS.state)
    assert r.address is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(r.address, timeout=60).close()


def test_orders_reach_all_ranks_and_reports_are_the_leader_s_to_tell(replica: Callable[..., Replica]) -> None:
    r = replica()
    ((follower, rank1),) = r.together()
    cookie, host, port, interval_ms, incarnation = rank1.until("welcomed")
    own = r.rank0.until("welcomed")
    assert (host, port) == ("127.0.0.1", 0), "this leader takes in no heartbeats"
    assert (cookie, interval_ms, incarnation) == (b"", own[3], own[4])
    epoch = EpochInfo(id=EpochId(TERM, 1), members=())
    deal = Deal(batches={"r0": 4}, cursor=5)
    r.coordinator.send(NewEpoch(term=TERM, epoch=epoch, step=5, deal=deal, lost={}, last_commit_epoch=NO_EPOCH))
    for delegate in (r.rank0, rank1):
        order = delegate.until("enter_epoch")
        assert (order.epoch, order.step, order.deal, order.retry) == (epoch, 5, deal, True)
    done = StepReduced(step=5, epoch=epoch.id, digest=1, finite=True, weight=2.0)
    follower.post(done)
    r.leader.post(StepReduced(step=5, epoch=epoch.id, digest=2, finite=False, weight=2.0))
    told = r.machine.until(StepReduced)
    assert (told.step, told.finite) == (5, False)
    follower.vote(1, Ballot(3))
    assert r.rank0.until("called") == 1
    r.leader.vote(1, Ballot(4))
    for delegate in (r.rank0, rank1):
        assert delegate.until("agreed") == (1, (Ballot(4), Ballot(3)))


def test_a_rank_whose_connection_closes_ends_the_replica(replica: Callable[..., Replica]) -> None:
    r = replica(3)
    (first, _), (_, rank2) = r.together()
    first.close()
    leave = r.machine.until(LeaveNow)
    assert "rank 1 is gone" in leave.reason
    assert r.rank0.until("end")[0] == RankExit.RESTART
    assert rank2.until("end") == (RankExit.RESTART, leave.reason)


def test_a_rank_whose_leader_is_gone_asks_to_be_started_again(replica: Callable[..., Replica]) -> None:
    r = replica()
    ((_, rank1),) = r.together()
    r.leader.close()
    code, reason = rank1.until("end")
    assert code == RankExit.RESTART
    assert "the leader of r0 is gone" in reason


@pytest.mark.parametrize(
    ("fields", "facts", "reason"),
    [
        ({"world_size": 3}, FACTS, "rank 1 has WORLD_SIZE=3, rank 0 has 2"),
        ({"replica": "r7"}, FACTS, "this is the leader of demo/r0, not of demo/r7"),
        ({}, RankFacts("plan", "state", 9), "rank 1 wants to end after step 9, rank 0 after step 0"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_with_the_reason(
    replica: Callable[..., Replica], fields: dict[str, Any], facts: RankFacts, reason: str
) -> None:
    r = replica()
    starting = r.start_leader()
    follower, _ = r.follower(1, facts, **fields)
    with pytest.raises(SettingsError, match=reason):
        follower.start()
    if facts is not FACTS:
        starting.join(60)
        assert isinstance(r.failure, SettingsError), "a script that differs between ranks is a fault of both"
        assert reason in str(r.failure)
    else:
        assert starting.is_alive(), "somebody else's rank changes nothing"
        good, _ = r.follower(1)
        good.start()
        starting.join(60)
        assert r.failure is None


def test_strangers_are_dropped_and_hold_nobody_up(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "STRANGER_S", 0.3)
    r = replica()
    starting = r.start_leader()
    address = r.find()
    silent = socket.create_connection(address, timeout=60)
    rude = socket.create_connection(address, timeout=60)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
    liar = socket.create_connection(address, timeout=60)
    parser: FrameParser[FromLeader] = FrameParser(from_leader)
    (challenge,) = parser.feed(liar.recv(4096))
    assert isinstance(challenge, TeamChallenge)
    liar.sendall(
        encode(
            RankHello(
                job="demo",
                replica="r0",
                world_size=2,
                info=info(1),
                plan="plan",
                state="state",
                last_step=0,
                nonce=nonce(),
                proof=prove(b"another token", "rank-hello", "demo", challenge.nonce),
            )
        )
    )
    for stranger in (silent, rude, liar):
        with stranger:
            stranger.settimeout(60)
            while stranger.recv(4096):
                pass
    assert starting.is_alive()
    good, _ = r.follower(1)
    good.start()
    starting.join(60)
    assert r.failure is None


def test_a_rank_does_not_follow_a_leader_that_cannot_prove_the_token(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftar_core.runtime.follower.ASSEMBLE_S", 0.5)
    r = replica()
    with socket.create_server(("127.0.0.1", 0)) as server:
        r.publish(Address("127.0.0.1", server.getsockname()[1]))

        def impostor() -> None:
            try:
                while True:
                    sock, _ = server.accept()
                    with sock:
                        sock.sendall(encode(TeamChallenge(job="demo", replica="r0", nonce=nonce())))
                        sock.recv(4096)
                        sock.sendall(encode(TeamWelcome(proof=b"x" * 32)))
                        sock.recv(1)
            except OSError:
                return

        threading.Thread(target=impostor, daemon=True).start()
        follower, _ = r.follower(1)
        with pytest.raises(NotAssembled, match="does not know the job token"):
            follower.start()


def test_a_rank_that_does_not_read_for_a_while_gets_every_order_and_holds_up_nobody(
    replica: Callable[..., Replica],
) -> None:
    r = replica(3)
    r.machine.effects[Received] = lambda e: [Wait(e.message.reason)] if isinstance(e.message, Hold) else []
    starting = r.start_leader()
    slow = Slow(r.find())
    other, delegate = r.follower(2)
    other.start()
    starting.join(60)
    r.coordinator.accept()
    r.coordinator.welcome()
    reasons = [f"{number} " + "because " * 5000 for number in range(60)]  # more than a socket's buffers hold
    for some in (reasons[:3], reasons[3:50], reasons[50:]):
        for reason in some:
            r.coordinator.send(Hold(term=TERM, reason=reason))
        assert [delegate.until("waiting") for _ in some] == some
        if some[-1] != reasons[2]:  # from here on it is up to date
            assert slow.reasons(len(some) + (3 if some[0] == reasons[3] else 0))[-1] == some[-1]
    assert slow.seen == reasons
    slow.sock.close()
    assert "rank 1 is gone" in r.machine.until(LeaveNow).reason


class Slow:
    """Rank 1, by hand."""

    def __init__(self, address: Address) -> None:
        self.sock = follower_module.dial_near(address) or socket.create_connection(address)
        self.sock.settimeout(60)
        self.parser: FrameParser[FromLeader] = FrameParser(from_leader)
        (challenge,) = self.parser.feed(self.sock.recv(4096))
        assert isinstance(challenge, TeamChallenge)
        proof = prove(TOKEN, "rank-hello", "demo", challenge.nonce)
        about: dict[str, Any] = {"job": "demo", "replica": "r0", "world_size": 3, "info": info(1)}
        self.sock.sendall(
            encode(RankHello(**about, plan="plan", state="state", last_step=0, nonce=nonce(), proof=proof))
        )
        self.seen: list[str] = []

    def reasons(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            found += [m.reason for m in self.parser.feed(self.sock.recv(1 << 16)) if isinstance(m, WaitOrder)]
        self.seen += found
        return found


def test_ranks_that_do_not_come_are_named(replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "ASSEMBLE_S", 0.3)
    r = replica(4)
    starting = r.start_leader()
    follower, _ = r.follower(2)
    follower.start()
    starting.join(60)
    assert isinstance(r.failure, NotAssembled)
    assert "rank 1, 3 of r0 did not connect" in str(r.failure)


def test_the_leader_listens_where_the_others_can_reach_it(replica: Callable[..., Replica]) -> None:
    r = replica()
    for fields, host in (
        ({"master": Address("127.0.0.1", 29500)}, "127.0.0.1"),
        ({"master": Address("192.0.2.7", 29500)}, "127.0.0.1"),  # not an address of this host: the first rail
        ({"master": Address("localhost", 29500)}, "localhost"),
        ({}, "127.0.0.1"),
    ):
        listeners, address = listen(r.settings(0, **fields))
        assert address.host == host
        socket.create_connection(address, timeout=60).close()
        for listener in listeners:
            listener.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        there = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(SettingsError, match=f"{there}: Address already in use"):
            listen(r.settings(0, leader=there))
