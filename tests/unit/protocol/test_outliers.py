"""A replica whose own gradient is of quite another size: a hint, once in a while, and none in calm jobs."""

from __future__ import annotations

import math
import random

from ftar_core.protocol.outliers import QUIET_STEPS, Outliers
from ftar_core.wire.ids import NO_EPOCH
from ftar_core.wire.messages import Done


def reports(norms: dict[str, float]) -> dict[str, Done]:
    return {n: Done(step=1, epoch=NO_EPOCH, digest=0, finite=True, norm=norm) for n, norm in norms.items()}


def calm(rng: random.Random, names: str, step: int) -> dict[str, float]:
    """Norms that fall, vary by a third from batch to batch, and jump for all once in a while."""
    base = (10.0 if step % 97 == 0 else 1.0) / (1 + step / 500)
    return {name: base * rng.lognormvariate(0, 0.3) for name in names}


def test_ten_thousand_calm_steps_give_no_hint() -> None:
    rng = random.Random(1)
    for names in ("ab", "abc", "abcdefgh"):
        outliers = Outliers()
        for step in range(1, 3400):
            assert outliers.committed(step, reports(calm(rng, names, step))) == []


def test_a_flipped_exponent_is_hinted_at_and_not_again_at_once() -> None:
    rng, outliers = random.Random(2), Outliers()
    hints: list[tuple[int, str, str]] = []
    for step in range(1, 60 + QUIET_STEPS + 5):
        norms = calm(rng, "abc", step)
        if step in (50, 52, 54 + QUIET_STEPS):
            norms["b"] *= 2.0**20
        hints += [(step, name, why) for name, why in outliers.committed(step, reports(norms))]
    assert [(step, name) for step, name, _ in hints] == [(50, "b"), (54 + QUIET_STEPS, "b")]
    assert "a hint only" in hints[0][2]


def test_who_is_different_all_the_time_or_tells_nothing_is_no_outlier() -> None:
    rng, outliers = random.Random(3), Outliers()
    for step in range(1, 200):
        norms = calm(rng, "abcd", step)
        norms["b"] *= 30  # its data are of another kind
        norms["c"], norms["d"] = (0.0, math.inf) if step % 5 == 0 else (norms["c"], norms["d"])
        assert outliers.committed(step, reports(norms)) == []
    assert Outliers().committed(1, reports({"a": 1.0, "b": 1e9})) == []  # nothing is known yet
