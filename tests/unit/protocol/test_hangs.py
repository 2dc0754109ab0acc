"""Who is hung, who is slow, and who may take its time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ftar_core.protocol.hangs import Standing, judge, most_move
from ftar_core.wire.heartbeat import Phase

LIMIT_S = 10.0


def waits(name: str, still_s: float = 12.0) -> Standing:
    """It has produced everything, and waits in the ring."""
    return Standing(name, step=7, produced=4, phase=Phase.REDUCE, still_s=still_s)


def stuck(name: str, **changes: object) -> Standing:
    one = Standing(name, step=7, produced=1, phase=Phase.FORWARD, still_s=13.0, phase_s=13.0)
    return replace(one, **changes)  # type: ignore[arg-type]


def test_the_one_that_has_produced_least_is_hung_not_those_that_wait_for_it() -> None:
    found = judge([waits("r0"), stuck("r1"), waits("r2")], LIMIT_S)
    assert list(found) == ["r1"]
    assert "has produced 1 buckets of step 7 and then nothing for 13 s (phase forward)" in found["r1"]
    assert "all others wait for 12 s" in found["r1"]


def test_nobody_is_hung_before_all_others_have_waited() -> None:
    assert not judge([waits("r0"), stuck("r1"), waits("r2", still_s=9.0)], LIMIT_S)


def test_slow_is_said_to_be_slow() -> None:
    found = judge([waits("r0"), stuck("r1", produced=3, still_s=0.5), waits("r2")], LIMIT_S)
    assert "the last one 0.5 s ago: slow" in found["r1"]


def test_a_checkpoint_is_no_hang_while_its_budget_lasts() -> None:
    writing = stuck("r1", phase=Phase.CHECKPOINT, phase_s=300.0, still_s=300.0)
    assert not judge([waits("r0"), writing], LIMIT_S)
    found = judge([waits("r0"), replace(writing, overdue=True)], LIMIT_S)
    assert "in phase checkpoint for 300 s, longer than its budget" in found["r1"]


def test_who_has_just_ended_a_checkpoint_is_not_hung_for_it() -> None:
    """The others have waited for the checkpoint, not for the forward pass that has begun now."""
    assert not judge([waits("r0"), stuck("r1", still_s=0.0, phase_s=0.1), waits("r2")], LIMIT_S)


def test_nobody_is_hung_while_one_takes_its_time() -> None:
    """r2 waits for nobody: it has not begun yet, because r1 is not done with its checkpoint."""
    writing = stuck("r1", phase=Phase.EVALUATION)
    assert not judge([waits("r0"), writing, stuck("r2", produced=0)], LIMIT_S)


def test_all_alike_is_nobody_s_fault() -> None:
    assert not judge([waits("r0"), waits("r1"), waits("r2")], LIMIT_S)
    assert not judge([waits("r0")], LIMIT_S)


def test_half_of_the_job_is_not_hung_but_a_minority_is() -> None:
    assert not judge([waits("r0"), waits("r1"), stuck("r2"), stuck("r3")], LIMIT_S)
    assert set(judge([waits("r0"), waits("r1"), waits("r4"), stuck("r2"), stuck("r3")], LIMIT_S)) == {"r2", "r3"}


def test_of_two_the_one_behind_is_hung() -> None:
    assert list(judge([waits("r0"), stuck("r1")], LIMIT_S)) == ["r1"]


def test_who_has_produced_all_but_never_reports_stands_out() -> None:
    """Stuck in the user's code between backward and session.step()."""
    others = [replace(waits(name), phase=Phase.COMMIT, done=True) for name in ("r0", "r2")]
    assert list(judge([*others, stuck("r1", produced=4)], LIMIT_S)) == ["r1"]


def test_in_the_update_of_the_step_before() -> None:
    late = stuck("r1", step=6, produced=4, phase=Phase.UPDATE)
    assert "of step 6" in judge([waits("r0"), late], LIMIT_S)["r1"]


def test_a_replica_of_several_ranks_names_the_rank() -> None:
    found = judge([waits("r0"), stuck("r1", rank=3, ranks=8)], LIMIT_S)
    assert found["r1"].startswith("rank 3 has produced 1 buckets")
    found = judge([waits("r0"), stuck("r1", rank=3, sharing=2, ranks=8)], LIMIT_S)
    assert found["r1"].startswith("rank 3 and 1 more of its 8 ranks have produced")
    found = judge([waits("r0"), stuck("r1", sharing=8, ranks=8)], LIMIT_S)
    assert found["r1"].startswith("all of its 8 ranks have produced")


@given(
    st.lists(
        st.builds(
            Standing,
            st.integers(0, 99).map(str),
            step=st.integers(6, 7),
            overdue=st.booleans(),
            produced=st.integers(0, 2),
            phase=st.sampled_from([Phase.FORWARD, Phase.CHECKPOINT, Phase.REDUCE]),
            still_s=st.sampled_from([0.0, LIMIT_S - 1, LIMIT_S, LIMIT_S + 5]),
            phase_s=st.sampled_from([0.0, LIMIT_S]),
        ),
        max_size=9,
    )
)
def test_while_most_of_them_move_nobody_is_hung(standings: list[Standing]) -> None:
    """The quick look may be trusted: it never hides somebody whom the long one finds."""
    if most_move([s.still_s for s in standings], LIMIT_S):
        assert judge(standings, LIMIT_S) == {}
