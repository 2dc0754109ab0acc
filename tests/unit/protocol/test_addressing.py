"""Members are told the addresses that they connect to, and no others."""

from __future__ import annotations

import pytest

from ftar_core.protocol.addressing import Addressing
from ftar_core.wire.codec import encode
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import Commit, Deal, Endpoint, EpochInfo, Hold, MemberInfo, NewEpoch, RankInfo, Verdict

TERM = Term(1, "c")


def epoch(replicas: int, ranks: int = 2) -> EpochInfo:
    def at(replica: int, rank: int) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(rail=f"rail{n}", addr=f"10.{replica % 200}.{n}.1", port=1000 + rank) for n in range(2))

    members = tuple(
        MemberInfo(
            replica=f"r{i}",
            incarnation=100 + i,
            slot=i,
            ranks=tuple(RankInfo(rank=k, node=f"n{i}", links=at(i, k), state=at(i, k)) for k in range(ranks)),
        )
        for i in range(replicas)
    )
    return EpochInfo(id=EpochId(TERM, 7), members=members)


def known(info: EpochInfo) -> list[str]:
    return [m.replica for m in info.members if m.ranks]


@pytest.mark.parametrize(
    ("replicas", "me", "neighbours"),
    [
        (1, "r0", ["r0"]),
        (2, "r1", ["r0", "r1"]),
        (3, "r1", ["r0", "r1", "r2"]),
        (5, "r0", ["r0", "r1", "r4"]),
        (5, "r4", ["r0", "r3", "r4"]),
        (9, "r4", ["r3", "r4", "r5"]),
    ],
)
def test_a_member_is_told_where_its_neighbours_in_the_ring_are(replicas: int, me: str, neighbours: list[str]) -> None:
    whole = epoch(replicas)
    near = Addressing().near(whole, me)
    assert known(near) == neighbours
    assert (near.id, near.names()) == (whole.id, whole.names())
    assert [(m.incarnation, m.slot) for m in near.members] == [(m.incarnation, m.slot) for m in whole.members]
    assert all(a.ranks == b.ranks for a, b in zip(near.members, whole.members, strict=True) if a.ranks)


def test_every_message_that_holds_an_epoch_is_narrowed_and_no_other_is_touched() -> None:
    addressing, whole, deal = Addressing(), epoch(6), Deal(batches={}, cursor=0)
    news = NewEpoch(term=TERM, epoch=whole, step=1, deal=deal, lost={}, last_commit_epoch=NO_EPOCH)
    told = addressing.narrow(news, "r2")
    assert isinstance(told, NewEpoch)
    assert known(told.epoch) == ["r1", "r2", "r3"]
    commit = Commit(term=TERM, step=1, epoch=whole.id, contributors=(), verdict=Verdict.APPLY, deal=deal, next=whole)
    told = addressing.narrow(commit, "r5")
    assert isinstance(told, Commit)
    assert told.next is not None
    assert known(told.next) == ["r0", "r4", "r5"]
    for same in (Hold(term=TERM, reason="x"), Commit(**{f: getattr(commit, f) for f in FIELDS}, next=None)):
        assert addressing.narrow(same, "r1") is same


FIELDS = ("term", "step", "epoch", "contributors", "verdict", "deal")


def test_a_rank_is_told_of_its_own_ring_only() -> None:
    ring = Addressing().near(epoch(5, ranks=4), "r1").ring_of(3)
    assert [[info.rank for info in m.ranks] for m in ring.members] == [[3], [3], [3], [], []]
    member = ring.members[0]
    assert member.at(3) == member.ranks[0]
    assert member.at(0) is None


def test_what_a_member_and_a_rank_are_told_stays_small_in_a_large_job() -> None:
    near = Addressing().near(epoch(16, ranks=640), "r3")
    deal = Deal(batches={}, cursor=0)
    news = NewEpoch(term=TERM, epoch=near, step=1, deal=deal, lost={}, last_commit_epoch=NO_EPOCH)
    assert len(encode(news)) < 512 * 1024
    many = Addressing().near(epoch(1024, ranks=1), "r3").ring_of(0)
    deal = Deal(batches={m.replica: 10_000_000 for m in many.members}, cursor=0)
    news = NewEpoch(term=TERM, epoch=many, step=1, deal=deal, lost={}, last_commit_epoch=NO_EPOCH)
    assert len(encode(news)) < 64 * 1024
