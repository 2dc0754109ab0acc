"""Who is silent, and whose fault it is."""

from __future__ import annotations

import pytest

from ftar_core.protocol.config import Detection
from ftar_core.protocol.detector import judge, worst

D = Detection(heartbeat_interval_s=0.1, suspect_after_s=1.0, evict_after_s=2.0)


@pytest.mark.parametrize(
    ("silent", "contributors", "suspects", "evict", "trouble"),
    [
        ({"r0": 0.1, "r1": 0.2, "r2": 0.9}, 3, (), (), False),
        ({"r0": 0.1, "r1": 1.0, "r2": 0.1}, 3, ("r1",), (), False),
        ({"r0": 0.1, "r1": 2.0, "r2": 0.1}, 3, ("r1",), ("r1",), False),
        ({"r0": 0.1, "r1": 9.0}, 2, ("r1",), ("r1",), False),
        ({"r0": 3.0, "r1": 3.0, "r2": 0.1}, 3, ("r0", "r1"), (), True),  # more than half at once
        ({"r0": 3.0, "r1": 3.0, "r2": 0.1, "r3": 0.1}, 4, ("r0", "r1"), (), True),  # half of them
        ({"r0": 3.0, "r1": 3.0, "r2": 0.1, "r3": 0.1, "r4": 0.1}, 5, ("r0", "r1"), ("r0", "r1"), False),
        ({"r0": 9.0}, 1, ("r0",), (), True),  # the last one is never judged by its silence
        ({}, 3, (), (), False),  # no heartbeats arrive at all: nobody is judged
    ],
)
def test_silence_is_judged(
    silent: dict[str, float], contributors: int, suspects: tuple[str, ...], evict: tuple[str, ...], trouble: bool
) -> None:
    verdict = judge(silent, contributors, D)
    assert (verdict.suspects, verdict.evict, bool(verdict.trouble)) == (suspects, evict, trouble)


def test_of_many_reports_the_one_whom_most_cannot_reach_goes() -> None:
    reports = {("a", "b"): "", ("b", "a"): "", ("c", "b"): "", ("b", "c"): ""}
    assert worst(reports, {"a", "b", "c"}) == "b"


def test_a_tie_takes_the_higher_id() -> None:
    assert worst({("r2", "r10"): ""}, {"r2", "r10"}) == "r10"
    assert worst({("r10", "r2"): ""}, {"r2", "r10"}) == "r10"


def test_reports_about_the_lost_do_not_count() -> None:
    assert worst({("a", "b"): "", ("c", "b"): ""}, {"a", "c"}) is None
