"""What must be atomic between the training thread and the control loop, with a ring that only notes what it is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ftar_core.protocol.effects import ApplyCommit, EnterEpoch, FollowSources
from ftar_core.training.exchange import Exchange, News, Role
from ftar_core.training.plan import make_plan
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import EpochId, Term, epoch_key
from ftar_core.wire.messages import Commit, Deal, EpochInfo, MemberInfo, RankInfo, Verdict

TERM = Term(1, "c")


class WrittenRing:
    def __init__(self) -> None:
        self.active = b""
        self.submitted: list[tuple[bytes, int, int]] = []
        self.prepared: list[bytes] = []

    def prepare(self, epoch: bytes, members: list[Any], me: int) -> None:
        self.prepared.append(epoch)

    def activate(self, epoch: bytes) -> None:
        self.active = epoch

    def discard(self, epoch: bytes) -> None:
        self.prepared.remove(epoch)

    def submit(self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int) -> None:
        assert src != dst
        if epoch == self.active:
            self.submitted.append((epoch, step, bucket))

    def abort(self) -> None:
        self.active = b""


def info(number: int, *names: str) -> EpochInfo:
    rank = RankInfo(rank=0, node="n", links=(), state=())
    members = tuple(MemberInfo(replica=n, incarnation=1, slot=i, ranks=(rank,)) for i, n in enumerate(names))
    return EpochInfo(id=EpochId(TERM, number), members=members)


def enter(number: int, step: int, *names: str, retry: bool = False) -> EnterEpoch:
    deal = Deal(batches={name: i for i, name in enumerate(names)}, cursor=len(names))
    return EnterEpoch(info(number, *names), step, deal, retry, EpochId(TERM, number))


def commit(step: int, number: int, **more: Any) -> ApplyCommit:
    return ApplyCommit(
        Commit(
            term=TERM,
            step=step,
            epoch=EpochId(TERM, number),
            contributors=("r0", "r1"),
            verdict=Verdict.APPLY,
            deal=Deal(batches={}, cursor=9),
            **more,
        )
    )


@pytest.fixture
def ring() -> WrittenRing:
    return WrittenRing()


@pytest.fixture
def exchange(ring: WrittenRing) -> Exchange:
    plan = make_plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_bytes=40)
    buffers = [[torch.zeros(b.count, dtype=b.dtype) for b in plan.all_buckets] for _ in range(2)]
    return Exchange(job="job", replica="r0", plan=plan, ring=ring, retained=buffers[0], reduced=buffers[1])


def key(number: int) -> bytes:
    return epoch_key("job", EpochId(TERM, number))


def buckets(exchange: Exchange) -> range:
    return range(len(exchange._plan.all_buckets))


def reduce_all(exchange: Exchange, number: int, step: int) -> None:
    for bucket in buckets(exchange):
        exchange.reduced(key(number), step, bucket)


def test_a_lost_member_in_the_middle_of_backward_costs_no_gradient(exchange: Exchange, ring: WrittenRing) -> None:
    exchange.enter_epoch(enter(1, 1, "r0", "r1", "r2"))
    exchange.produced(0)
    exchange.produced(1)
    exchange.reduced(key(1), 1, 0)  # finished, and reduced again all the same
    exchange.enter_epoch(enter(2, 1, "r0", "r1", retry=True))
    for bucket in list(buckets(exchange))[2:]:
        exchange.produced(bucket)
    assert ring.submitted[:2] == [(key(1), 1, 0), (key(1), 1, 1)]
    assert ring.submitted[2:] == [(key(2), 1, bucket) for bucket in buckets(exchange)]
    exchange.reduced(key(1), 1, 1)  # a late event of the dead epoch
    assert exchange.reduced_epoch() is None
    reduce_all(exchange, 2, 1)
    assert exchange.wait(0) in {News.ROLE, News.REDUCED}
    assert exchange.reduced_epoch() == EpochId(TERM, 2)
    assert exchange.place().retries == 1


def test_results_of_an_old_epoch_are_not_announced(exchange: Exchange) -> None:
    exchange.enter_epoch(enter(1, 1, "r0", "r1"))
    for bucket in buckets(exchange):
        exchange.produced(bucket)
    reduce_all(exchange, 1, 1)
    epoch = exchange.reduced_epoch()
    assert epoch is not None
    exchange.enter_epoch(enter(2, 1, "r0", retry=True))  # while the training thread computes the digest
    told: list[int] = []
    assert not exchange.take_reduced(epoch, lambda: told.append(1))
    reduce_all(exchange, 2, 1)
    assert exchange.take_reduced(EpochId(TERM, 2), lambda: told.append(2))
    assert told == [2]


def test_a_step_is_announced_once(exchange: Exchange) -> None:
    exchange.enter_epoch(enter(1, 1, "r0"))
    assert exchange.wait(0) is News.ROLE
    for bucket in buckets(exchange):
        exchange.produced(bucket)
    reduce_all(exchange, 1, 1)
    assert exchange.wait(0) is News.REDUCED
    assert exchange.take_reduced(EpochId(TERM, 1), lambda: None)
    assert exchange.wait(0) is News.TIMEOUT


def test_the_commit_comes_before_the_end_and_nothing_comes_after_the_last(exchange: Exchange) -> None:
    exchange.enter_epoch(enter(1, 1, "r0"))
    exchange.apply_commit(commit(1, 1, last=True))
    exchange.end(RankExit.FINISHED, "done")
    assert exchange.wait(0) is News.COMMIT
    assert exchange.ended() is None
    assert exchange.place().stopping
    taken = exchange.take_commit()[1].commit
    assert taken.step == 1
    assert exchange.wait(0) is News.END
    ended = exchange.ended()
    assert ended is not None
    assert ended.exit_code == RankExit.FINISHED


def test_a_new_step_forgets_the_buckets_of_the_last(exchange: Exchange, ring: WrittenRing) -> None:
    exchange.enter_epoch(enter(1, 1, "r0", "r1"))
    for bucket in buckets(exchange):
        exchange.produced(bucket)
    reduce_all(exchange, 1, 1)
    exchange.apply_commit(commit(1, 1))
    ring.submitted.clear()
    exchange.enter_epoch(enter(2, 2, "r0", "r1", "r2"))  # somebody joins: nothing of step 1 may go to the new ring
    assert ring.submitted == []
    exchange.produced(0)
    assert ring.submitted == [(key(2), 2, 0)]


def test_a_member_that_fell_behind_becomes_a_shadow_and_submits_nothing(exchange: Exchange, ring: WrittenRing) -> None:
    exchange.enter_epoch(enter(1, 5, "r0", "r1"))
    assert exchange.wait(0) is News.ROLE
    exchange.produced(0)
    exchange.holding("the job starts when 2 replicas are here")
    exchange.follow_sources(FollowSources(sources=()))
    assert ring.active == b""
    assert not exchange.place().holding
    assert exchange.wait(0) is News.ROLE
    assert exchange.place().role is Role.SHADOW
    ring.submitted.clear()
    exchange.produced(1)
    assert ring.submitted == []
    exchange.apply_commit(commit(5, 1))  # for contributors: a shadow hears it from its source
    assert exchange.wait(0) is News.TIMEOUT


def test_waiting_ends_as_soon_as_there_is_news(exchange: Exchange) -> None:
    seen: list[News] = []
    waiter = threading.Thread(target=lambda: seen.append(exchange.wait(90)))
    waiter.start()
    exchange.poke()
    waiter.join(90)
    assert seen == [News.POKE]


def test_a_membership_without_me_is_an_error_not_a_ring(exchange: Exchange) -> None:
    with pytest.raises(ValueError, match="not in"):
        exchange.prepare_ring(info(3, "r1", "r2"))
