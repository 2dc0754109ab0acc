"""Gradients that are not finite: one verdict for everybody, whoever hears of it when."""

from __future__ import annotations

import pytest

from ftar_core.wire.exits import RankExit

from .hand import Hand
from .test_histories import cluster, restart, run_steps


def not_finite_at(hand: Hand, step: int) -> None:
    hand.world.finite = lambda at, result: at != step


@pytest.mark.parametrize("fail", [False, True])
def test_everybody_skips_or_the_job_fails_for_everybody(fail: bool) -> None:
    hand = cluster(fail_on_nonfinite=fail)
    not_finite_at(hand, 3)
    hand.lazy = set()
    assert hand.pump(until=lambda: hand.world.truth.last >= (3 if fail else 5))
    hand.lazy = set("abc")
    hand.pump()
    assert hand.world.truth.verdicts[3] == ("fail" if fail else "skip")
    assert {len(x.history) for x in hand.world.lives} == {hand.world.truth.last}
    if fail:
        assert {x.exit.exit_code if x.exit else None for x in hand.world.lives} == {RankExit.FAILED}
        stop = hand.world.servers[0].exit
        assert stop is not None
        assert (stop.exit_code, "was" in stop.reason or "were" in stop.reason) == (1, True)


def test_a_failure_that_only_one_has_heard_of_is_one_for_all_after_a_restart() -> None:
    hand = cluster(fail_on_nonfinite=True)
    run_steps(hand, 2)
    not_finite_at(hand, 3)
    hand.deaf = {"b", "c"}
    hand.lazy = set()
    assert hand.pump(until=lambda: hand.world.truth.last == 3)
    restart(hand)
    hand.deaf = set()
    hand.pump()
    hand.advance(3)
    assert {len(x.history) for x in hand.world.lives} == {3}
    assert {x.exit.exit_code if x.exit else None for x in hand.world.lives} == {RankExit.FAILED}


def test_a_hot_spare_is_dismissed_when_the_job_fails() -> None:
    hand = cluster("ab", fail_on_nonfinite=True)
    spare = hand.world.start_life("c")
    run_steps(hand, 1)
    not_finite_at(hand, 3)
    hand.lazy = set()
    hand.pump()
    assert spare.exit is not None
    assert "the job has failed" in spare.exit.reason
