"""The ranks of a replica that catches up do the same, whatever reaches which of them first."""

from __future__ import annotations

import threading

import msgspec

from ftar_core.training.lockstep import Agreement, Do, conclude
from ftar_core.wire.team import Ballot, Front

FOLLOWS = Ballot(7, connected=True)
FETCHES = Ballot(-1)


def but(ballot: Ballot, **fields: object) -> Ballot:
    return msgspec.structs.replace(ballot, **fields)


def snapshot(step: int) -> Ballot:
    return Ballot(-1, Front.SNAPSHOT, step, connected=True)


def test_a_snapshot_is_loaded_when_all_ranks_have_that_of_the_same_step() -> None:
    assert conclude([snapshot(5), FETCHES]) is Do.WAIT
    assert conclude([snapshot(5), snapshot(5)]) is Do.LOAD
    assert conclude([snapshot(5)]) is Do.LOAD


def test_ranks_with_snapshots_of_different_steps_all_fetch_anew() -> None:
    assert conclude([snapshot(5), snapshot(6)]) is Do.RESTART
    assert conclude([snapshot(9), FOLLOWS]) is Do.RESTART, "one had to begin again while the other went on"
    assert conclude([snapshot(9), but(FOLLOWS, connected=False)]) is Do.WAIT, "its own may be on the way"


def test_a_step_is_replayed_when_all_ranks_have_it() -> None:
    with_step = but(FOLLOWS, front=Front.STEP, front_step=8)
    assert conclude([with_step, FOLLOWS]) is Do.WAIT
    assert conclude([with_step, with_step]) is Do.REPLAY
    assert conclude([with_step, but(with_step, connected=False)]) is Do.REPLAY, "what has arrived counts"


def test_warm_ups_come_before_following_and_not_after_a_join() -> None:
    cold = but(FOLLOWS, warm_ups=2)
    assert conclude([cold, cold]) is Do.WARM_UP
    assert conclude([cold, but(cold, connected=False)]) is Do.WAIT
    assert conclude([cold, but(cold, joins_at=9)]) is Do.WAIT
    assert conclude([FOLLOWS, FOLLOWS]) is Do.FOLLOW
    assert conclude([FETCHES, FETCHES]) is Do.WAIT


def test_all_ranks_begin_to_contribute_together() -> None:
    joined = but(FOLLOWS, joins_at=8)
    assert conclude([joined, FOLLOWS]) is Do.FOLLOW, "the other has not heard of it yet"
    assert conclude([joined, joined]) is Do.CONTRIBUTE
    behind = but(FOLLOWS, joins_at=9, front=Front.STEP, front_step=8)
    assert conclude([behind, behind]) is Do.REPLAY
    assert conclude([Ballot(0, joins_at=1), Ballot(0, joins_at=1)]) is Do.CONTRIBUTE, "the start of a job"
    assert conclude([Ballot(0), FETCHES]) is Do.WAIT, "one has not heard yet what to be"


def test_an_agreement_brings_the_ballots_together_and_does_not_outwait_the_end() -> None:
    over = threading.Event()
    votes: list[tuple[int, Ballot]] = []
    agreement = Agreement(lambda number, ballot: votes.append((number, ballot)), over.is_set)
    both = (FOLLOWS, FETCHES)
    threading.Timer(0.05, lambda: agreement.agreed(1, both)).start()
    assert agreement.reach(FOLLOWS) == both
    threading.Timer(0.05, lambda: (over.set(), agreement.wake())).start()
    assert agreement.reach(FOLLOWS) == ()
    assert votes == [(1, FOLLOWS), (2, FOLLOWS)]
