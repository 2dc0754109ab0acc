"""The catch-up benchmark on a rail of limited rate, and what it says to wrong input."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.catchup import parse
from ftar_core.bench.report import UsageError

from .runs import rows_of


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_fetch_from_two_sources_beside_a_bare_copy() -> None:
    args = ["--rates", "300", "--sources", "2", "--size", "8M", "--rounds", "1"]
    rows = rows_of("catchup", *args)
    (row,) = rows
    assert (row["rail_mbit"], row["sources"], row["bytes"]) == (300, 2, 8 << 20)
    assert 0 < row["mbit"] < 360  # the limit is in force
    assert row["ratio_bare"] == pytest.approx(row["bare_s"] / row["fetch_s"], rel=0.05)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--rates", "fast"], "--rates"),
        (["--sources", "0"], "--sources"),
        (["--sources", "1,many"], "--sources"),
        (["--size", "1M,2M"], "one size"),
        (["--size", "100K"], "100K"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_input(args: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse(args)
