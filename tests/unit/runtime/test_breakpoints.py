"""Named points to fail at: what may be asked for, and when it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ftar_core.runtime import breakpoints
from ftar_core.runtime.breakpoints import BreakpointHit, Breakpoints, passes
from ftar_core.wire.agentlink import ArmBreakpoints
from ftar_core.wire.breakpoints import Action, Spec, coordinator_points, parse, rank_points


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    breakpoints.install(None)


def arm(text: str, rank: int = 0) -> list[tuple[int, int, int]]:
    """What the native core was asked for."""
    native: list[tuple[int, int, int]] = []
    armed = Breakpoints(rank, lambda step, bucket, signal: native.append((step, bucket, signal)))
    armed.arm(parse(text, rank_points()))
    breakpoints.install(armed)
    return native


def hits(point: str, steps: range, bucket: int = -1) -> list[int]:
    found = []
    for step in steps:
        try:
            passes(point, step, bucket)
        except BreakpointHit:
            found.append(step)
    return found


def test_a_spec_says_where_when_and_what() -> None:
    text = "serve,step=3,rank=1,action=sleep,ms=20,skip=1,count=2; bucket,bucket=4 ;"
    specs = parse(text, rank_points())
    assert specs == (
        Spec("serve", step=3, rank=1, action=Action.SLEEP, ms=20, skip=1, count=2),
        Spec("bucket", bucket=4),
    )
    assert parse("; ".join(spec.text() for spec in specs), rank_points()) == specs
    assert parse("allow", rank_points()) == ()
    assert parse("after-record:new-epoch,step=7", coordinator_points()) == (Spec("after-record:new-epoch", step=7),)
    assert {"before-record", "before-send:commit", "heard:done"} <= set(coordinator_points())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("reducd", "no point 'reducd' here, did you mean 'reduced'?"),
        ("after-send:commit", "no point 'after-send:commit' here"),  # a coordinator's
        ("reduced,steps=3", "reduced: 'steps=3' is none of action=, step=, rank="),
        ("reduced,step", "'step' is none of"),
        ("reduced,step=-3", "step='-3' is no whole number"),
        ("reduced,step=3,step=4", "step is given twice"),
        ("reduced,action=explode", "action 'explode' is none of kill, stop, raise, sleep"),
        ("reduced,action=sleep", "action=sleep and ms=N belong together"),
        ("reduced,ms=5", "action=sleep and ms=N belong together"),
        ("reduced,count=0", "count must be at least 1"),
        ("bucket,action=raise", "can only kill or stop"),
        ("bucket,skip=2", "skip and count do not go with it"),
        ("reduced;" * 33, "33 breakpoints"),
        ("x" * 5000, "longer than 4096"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_reason(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")):
        parse(text, rank_points())


def test_a_point_fails_at_its_step_or_the_first_time_later() -> None:
    arm("update,step=5,action=raise")
    assert hits("update", range(1, 5)) == []
    assert hits("reduced", range(1, 9)) == []
    assert hits("update", range(7, 12)) == [7]


def test_skip_and_count_are_counted_from_the_step_on() -> None:
    arm("update,step=5,action=raise,skip=2,count=3")
    assert hits("update", range(1, 20)) == [7, 8, 9]


def test_a_bucket_or_rank_of_its_own() -> None:
    arm("backward,bucket=2,action=raise")
    assert hits("backward", range(1, 4), bucket=1) == []
    assert hits("backward", range(1, 4), bucket=2) == [1]
    arm("update,rank=1,action=raise", rank=0)
    assert hits("update", range(3)) == []
    arm("update,rank=1,action=raise", rank=1)
    assert hits("update", range(3)) == [0]


def test_sleep_holds_the_thread_and_goes_on() -> None:
    arm("update,action=sleep,ms=30")
    began = time.monotonic()
    assert hits("update", range(5)) == []
    assert time.monotonic() - began >= 0.03


def test_the_middle_of_a_bucket_is_the_native_core_s() -> None:
    assert arm("bucket,step=4,action=stop; bucket,step=9,bucket=1") == [(4, -1, 19), (9, 1, 9)]


def test_an_agent_arms_later_only_what_was_allowed_at_the_start() -> None:
    order = ArmBreakpoints(text="update,step=3,action=raise")
    breakpoints.arm_on_order(order)
    assert hits("update", range(9)) == []
    arm("allow")
    breakpoints.arm_on_order(ArmBreakpoints(text="nowhere"))
    breakpoints.arm_on_order(order)
    assert hits("update", range(9)) == [3]


def test_without_the_variable_nothing_is_ever_armed() -> None:
    breakpoints.install(None)
    assert hits("update", range(100)) == []


def test_what_the_agent_asks_for_a_time_is_counted_cleared_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(breakpoints.time, "monotonic", lambda: now)
    breakpoints.install(Breakpoints())
    try:
        breakpoints.arm_on_order(ArmBreakpoints(text="update,action=raise", for_ms=5000))
        assert breakpoints.waiting() == 1
        breakpoints.arm_on_order(ArmBreakpoints(text="", clear=True))
        breakpoints.passes("update", 1)
        assert breakpoints.waiting() == 0
        breakpoints.arm_on_order(ArmBreakpoints(text="update,action=raise", for_ms=5000))
        now += 5.0
        assert breakpoints.waiting() == 0
        breakpoints.passes("update", 2)
        breakpoints.arm_on_order(ArmBreakpoints(text="bucket", for_ms=5000))
        assert breakpoints.waiting() == 0
        breakpoints.arm_on_order(ArmBreakpoints(text="update,action=raise", for_ms=5000))
        with pytest.raises(BreakpointHit):
            breakpoints.passes("update", 3)
        assert breakpoints.waiting() == 0
    finally:
        breakpoints.install(None)
