"""Who makes the others wait."""

from __future__ import annotations

import pytest

from ftar_core.protocol.pace import Paces, ratios
from ftar_core.wire.ids import NO_EPOCH
from ftar_core.wire.messages import Done


def done(compute_ms: float, wait_ms: float, rank: int = 0) -> Done:
    return Done(
        step=1, epoch=NO_EPOCH, digest=0, finite=True, step_ms=compute_ms + wait_ms, wait_ms=wait_ms, slow_rank=rank
    )


def step(paces: Paces, *, slow_ms: float = 200.0, ranks: int = 1) -> list[str]:
    reports = {"r0": done(200, slow_ms - 200), "r1": done(slow_ms, 0, rank=3), "r2": done(210, slow_ms - 210)}
    return [f"{h.replica} {h.begins}: {h.reason}" for h in paces.committed(reports, 1.5, 5, ranks)]


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ({"r0": 200.0, "r1": 400.0, "r2": 200.0}, {"r0": 200 / 300, "r1": 2.0, "r2": 200 / 300}),
        ({"r0": 200.0, "r1": 400.0}, {"r0": 0.5, "r1": 2.0}),
        ({"r0": 1.0, "r1": 3.0}, {"r0": 1.0, "r1": 1.0}),  # milliseconds are the scheduler's
        ({"r0": 200.0}, {"r0": 1.0}),
        ({"r0": 0.0, "r1": 0.0}, {"r0": 1.0, "r1": 1.0}),
        ({}, {}),
    ],
)
def test_computing_time_is_compared_with_the_median_of_the_others(
    compute: dict[str, float], expected: dict[str, float]
) -> None:
    assert ratios(compute) == pytest.approx(expected)


def test_a_hint_comes_after_some_slow_steps_in_a_row_and_once() -> None:
    paces = Paces()
    said = [step(paces, slow_ms=400) for _ in range(12)]
    assert [bool(s) for s in said] == [False] * 4 + [True] + [False] * 7
    assert said[4] == [
        "r1 True: computes 400 ms a step, 2.0 x the median of the others, and waits 0 ms, for 5 steps now"
    ]


def test_one_slow_step_is_chance() -> None:
    paces = Paces()
    for _ in range(10):
        assert not step(paces, slow_ms=900)
        assert not step(paces)


def test_when_it_keeps_pace_again_that_is_said_too() -> None:
    paces = Paces()
    for _ in range(5):
        step(paces, slow_ms=400)
    said = [step(paces) for _ in range(5)]
    assert said[-1] == ["r1 False: it keeps pace with the others again, for 5 steps"]
    assert not any(said[:-1])


def test_the_rank_that_computed_longest_is_named() -> None:
    paces = Paces()
    said = [step(paces, slow_ms=400, ranks=8) for _ in range(5)]
    assert said[-1][0].endswith("; rank 3 computes longest")


def test_who_left_is_forgotten() -> None:
    paces = Paces()
    step(paces, slow_ms=400)
    paces.committed({"r0": done(200, 0)}, 1.5, 5)
    assert set(paces.by_name) == {"r0"}
    assert paces.ratio("r0") is None
