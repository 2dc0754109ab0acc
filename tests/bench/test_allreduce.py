"""The all-reduce benchmark: real ranks, a quick run; and what it says to wrong input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("ftar_core.native._core")
from ftar_core.bench import allreduce
from ftar_core.bench.__main__ import main
from ftar_core.bench.report import BenchError


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftar_core.bench", *args], capture_output=True, text=True, timeout=100, check=False
    )


def test_three_systems_are_measured_in_one_run() -> None:
    done = bench("allreduce", "--ranks", "3", "--sizes", "64,256K", "--seconds", "0.05", "-o", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["bench"]) == (1, "allreduce")
    assert [(row["ranks"], row["bytes"]) for row in report["rows"]] == [(3, 64), (3, 262144)]
    for row in report["rows"]:
        assert row["count"] >= 10
        assert min(row["ours_us"], row["gloo_us"], row["wire_us"]) > 0
        assert row["ratio_gloo"] == pytest.approx(row["gloo_us"] / row["ours_us"], abs=0.01)
        assert row["ratio_wire"] == pytest.approx(row["wire_us"] / row["ours_us"], abs=0.01)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("allreduce", "--sizes", "1Q"), "'1Q': a size such as 64K"),
        (("allreduce", "--sizes", "6"), "multiple of 4"),
        (("allreduce", "--sizes", "8G"), "from 4 B to 1 GiB"),
        (("allreduce", "--ranks", "1"), "from 2 to 64 ranks"),
        (("allreduce", "--ranks", "two"), "numbers such as 2,4"),
        (("allreduce", "--seconds", "0"), "--seconds"),
        (("alreduce",), "no such benchmark"),
    ],
)
def test_wrong_input_is_named(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err


def test_a_rank_that_dies_is_told_with_its_last_words() -> None:
    with pytest.raises(BenchError, match=r"rank 0 failed: .*negative dimension"):
        list(allreduce.run(2, [-4], 0.05))
