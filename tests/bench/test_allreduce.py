"""The all-reduce benchmark: real ranks, a quick run; and what it says to wrong input."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("ftar_core.native._core")
from ftar_core.bench import allreduce
from ftar_core.bench.report import BenchError

from .runs import rows_of


def test_three_systems_are_measured_in_one_run() -> None:
    rows = rows_of("allreduce", "--ranks", "3", "--sizes", "64,256K", "--seconds", "0.05")
    assert [(row["ranks"], row["bytes"]) for row in rows] == [(3, 64), (3, 262144)]
    for row in rows:
        assert row["count"] >= 10
        assert min(row["ours_us"], row["gloo_us"], row["wire_us"]) > 0
        for name in ("gloo", "wire"):  # both times are rounded to 0.1 us, and the ratio to 0.01
            ratio = row[f"{name}_us"] / row["ours_us"]
            rounded = 0.05 * (1 + ratio) / row["ours_us"]
            assert row[f"ratio_{name}"] == pytest.approx(ratio, abs=0.006 + rounded)


def test_a_rank_that_dies_is_told_with_its_last_words() -> None:
    with pytest.raises(BenchError, match=r"rank 0 failed: .*negative dimension"):
        list(allreduce.run(2, [-4], 0.05))
