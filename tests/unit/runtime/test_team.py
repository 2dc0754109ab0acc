"""The voice of a replica of several ranks: it says what follows from what all of them have said, and nothing late."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from ftar_core.protocol.events import LeaveNow, MemberEvent, PeerUnreachable, RingReady, ShadowAt, StepReduced, Tick
from ftar_core.runtime.team import RankFacts, Team, event_of, joint_hash, misfit, report_of
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.team import Agreed, Ballot, Call

TERM = Term(1, "c")
E1, E2 = EpochId(TERM, 1), EpochId(TERM, 2)


def reduced(step: int, epoch: EpochId = E1, **fields: object) -> StepReduced:
    made = StepReduced(
        step=step, epoch=epoch, digest=step, finite=True, loss=1.0, step_ms=5.0, produced_at=9.0, weight=3.0
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def team(size: int = 2) -> Team:
    made = Team(size)
    made.entered(E1, 1)
    return made


def test_a_step_is_reduced_when_it_is_on_all_ranks() -> None:
    t = team(3)
    assert t.heard(1, reduced(1, loss=1.0, step_ms=4.0)) == []
    assert t.heard(0, reduced(1, loss=2.0, step_ms=6.0, produced_at=12.0)) == []
    (told,) = t.heard(2, reduced(1, loss=None))
    assert isinstance(told, StepReduced)
    assert (told.step, told.epoch, told.finite, told.loss) == (1, E1, True, 1.5)
    assert (told.step_ms, told.produced_at) == (6.0, 12.0)


def test_the_digest_depends_on_every_rank_and_on_its_place_but_not_on_who_came_first() -> None:
    def digest(order: tuple[int, ...], digests: dict[int, int]) -> int:
        t = team()
        told: list[MemberEvent] = []
        for rank in order:
            told = t.heard(rank, reduced(1, digest=digests[rank]))
        assert isinstance(told[0], StepReduced)
        return told[0].digest

    assert digest((0, 1), {0: 5, 1: 6}) == digest((1, 0), {0: 5, 1: 6})
    assert len({digest((0, 1), d) for d in ({0: 5, 1: 6}, {0: 6, 1: 5}, {0: 5, 1: 7}, {0: 2**64 - 1, 1: 6})}) == 4


def test_one_rank_with_gradients_that_are_not_finite_is_enough_to_skip() -> None:
    t = team()
    t.heard(0, reduced(1))
    (told,) = t.heard(1, reduced(1, finite=False))
    assert isinstance(told, StepReduced)
    assert not told.finite


def test_results_of_an_epoch_that_is_over_count_for_nothing() -> None:
    t = team()
    t.heard(0, reduced(1))
    t.entered(E2, 1)
    assert t.heard(1, reduced(1)) == [], "that is the old epoch's"
    assert t.heard(1, reduced(1, E2)) == []
    assert len(t.heard(0, reduced(1, E2))) == 1


def test_after_a_commit_the_next_step_begins_with_nothing_reduced() -> None:
    t = team()
    t.heard(0, reduced(1))
    t.heard(1, reduced(1))
    t.committed(1)
    assert t.heard(0, reduced(1)) == []
    assert t.heard(0, reduced(2)) == []
    assert len(t.heard(1, reduced(2))) == 1


def test_weights_that_differ_between_ranks_end_the_replica_and_are_named() -> None:
    t = team()
    t.heard(1, reduced(1, weight=4.0))
    (told,) = t.heard(0, reduced(1, weight=3.0))
    assert isinstance(told, LeaveNow)
    assert told.exit_code == RankExit.USAGE
    assert "4 on rank 1" in told.reason
    assert "3 on rank 0" in told.reason


def test_a_ring_is_ready_when_it_is_on_all_ranks_and_still_wanted() -> None:
    t = team()
    t.prepared(E1)
    assert t.heard(0, RingReady(E1)) == []
    t.discarded(E1)
    t.prepared(E2)
    assert t.heard(1, RingReady(E1)) == []
    assert t.heard(1, RingReady(E2)) == []
    assert t.heard(0, RingReady(E2)) == [RingReady(E2)]


def test_a_shadow_is_as_far_as_its_last_rank_and_ready_when_all_are() -> None:
    t = team()
    assert t.heard(0, ShadowAt(7, E1, False, "replaying")) == []
    assert t.heard(1, ShadowAt(6, E1, False, "replaying")) == [ShadowAt(6, E1, False, "replaying")]
    assert t.heard(0, ShadowAt(7, E1, True, "following")) == [], "that changes nothing for the replica"
    assert t.heard(1, ShadowAt(7, E1, True, "following")) == [ShadowAt(7, E1, True, "following")]
    assert t.heard(0, ShadowAt(7, E1, True, "contributing")) == []
    assert t.heard(1, ShadowAt(7, E1, True, "contributing")) == [ShadowAt(7, E1, True, "contributing")], (
        "told anew by all"
    )
    (fallen,) = t.heard(1, ShadowAt(-1, NO_EPOCH, False, "fetching"))
    assert isinstance(fallen, ShadowAt)
    assert (fallen.step, fallen.ready) == (-1, False)


def test_a_spare_stays_ready_while_its_ranks_follow_one_after_the_other() -> None:
    t = team()
    for rank in (0, 1):
        told = t.heard(rank, ShadowAt(7, E1, True, "following"))
    assert told == [ShadowAt(7, E1, True, "following")]
    assert t.heard(1, ShadowAt(8, E1, True, "following")) == []
    assert t.heard(0, ShadowAt(8, E1, True, "following")) == [ShadowAt(8, E1, True, "following")]
    assert t.heard(0, ShadowAt(8, E1, False, "replaying")) == [ShadowAt(8, E1, False, "replaying")]


def test_what_one_rank_cannot_reach_the_replica_cannot_reach() -> None:
    t = team()
    assert t.heard(0, PeerUnreachable("r2", E1, "no rail")) == [PeerUnreachable("r2", E1, "no rail")]
    assert t.heard(1, PeerUnreachable("r2", E1, "no rail")) == [PeerUnreachable("r2", E1, "rank 1: no rail")]


def test_a_rank_that_is_gone_or_leaves_ends_the_replica_once() -> None:
    t = team(3)
    assert t.lost(2, "connection closed") == [LeaveNow("rank 2 is gone (connection closed)", RankExit.RESTART)]
    assert t.lost(1, "connection closed") == []
    assert t.heard(0, reduced(1)) == []
    assert team().heard(1, LeaveNow("on purpose", 75)) == [LeaveNow("rank 1: on purpose", 75)]
    assert team().heard(0, LeaveNow("on purpose", 75)) == [LeaveNow("on purpose", 75)]


def test_all_are_told_all_ballots_whatever_the_order_of_the_votes() -> None:
    ballots = [Ballot(step) for step in (4, 5, 6)]
    for order in itertools.permutations(range(3)):
        t = team(3)
        said = [t.voted(rank, 1, ballots[rank]) for rank in order]
        assert said == [Call(round=1), None, Agreed(round=1, ballots=tuple(ballots))]
        assert t.voted(0, 1, ballots[0]) is None, "the round is over"
        assert t.voted(0, 2, ballots[0]) == Call(round=2)


def test_events_travel_unchanged() -> None:
    for event in (
        reduced(3, digest=2**64 - 1, loss=None),
        RingReady(E2),
        ShadowAt(4, E1, True, "x"),
        PeerUnreachable("r1", E1, "why"),
        LeaveNow("why", 2),
    ):
        report = report_of(event)
        assert report is not None
        assert event_of(report) == event
    assert report_of(Tick()) is None


def test_a_replica_of_one_rank_is_known_by_that_rank_s_hash_and_others_by_all() -> None:
    assert joint_hash(["aa"]) == "aa"
    assert len({joint_hash(p) for p in (["aa", "bb"], ["bb", "aa"], ["aa", "bb", "cc"], ["aabb"])}) == 4


def test_ranks_that_wish_for_different_ends_do_not_fit() -> None:
    mine = RankFacts("p", "s", 10)
    assert misfit(mine, replace(mine, plan="q", state="t"), 1) == ""
    assert "rank 1 wants to end after step 12" in misfit(mine, replace(mine, last_step=12), 1)
    assert misfit(mine, replace(mine, data_plane="nccl"), 1) == "rank 1 has data_plane=nccl, rank 0 has host"


@pytest.mark.parametrize("seed", range(40))
def test_a_replica_is_done_with_a_step_only_if_each_rank_said_so_in_that_epoch_and_step(seed: int) -> None:
    """Against a dumb twin, over random orders, reports, late reports and retries."""
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    t = Team(size)
    epoch, step = 1, 1
    t.entered(EpochId(TERM, epoch), step)
    said: dict[tuple[int, int], set[int]] = {}
    for _ in range(200):
        what = rng.random()
        if what < 0.1:
            epoch += 1
            t.entered(EpochId(TERM, epoch), step)
            said = {key: ranks for key, ranks in said.items() if key[0] == epoch}
        elif what < 0.2:
            t.committed(step)
            step += 1
        else:
            rank = rng.randrange(size)
            key = (rng.choice((epoch, max(1, epoch - 1))), rng.choice((step, max(1, step - 1))))
            told = t.heard(rank, reduced(key[1], EpochId(TERM, key[0])))
            current = key == (epoch, step)
            if current:
                said.setdefault(key, set()).add(rank)
            assert bool(told) == (current and len(said[key]) == size)
