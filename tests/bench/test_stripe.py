"""The striping benchmark on rails of limited rate, and what it says to wrong input."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.stripe import Case

from .runs import rows_of


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_plugin_on_one_rail_and_striped_beside_a_bare_stream() -> None:
    args = ["--rates", "200+100", "--size", "256K", "--seconds", "0.4", "--rounds", "2"]
    rows = rows_of("stripe", *args)
    shown = [(row["rails_mbit"], row["mode"]) for row in rows]
    assert shown == [("200", "socket"), ("200", "backup"), ("200+100", "stripe")]
    bare, ours, striped = rows
    assert bare["goal"] is bare["met"] is None
    assert 0 < bare["mbit"] < 220  # the limit is in force
    assert ours["ratio_rail"] == pytest.approx(ours["mbit"] / bare["mbit"], abs=0.01)
    assert ours["met"] is (ours["ratio_rail"] >= ours["goal"] == 0.98)
    assert 0 < striped["mbit"] < 330
    assert striped["goal"] == pytest.approx(0.95 * 1.5)


def test_goals() -> None:
    assert Case((1000, 1000), "stripe").goal() == 1.9
    assert Case((1000, 250), "stripe").goal() == pytest.approx(1.1875, abs=0.001)
    assert Case((1000, 250), "backup").shown() == "1000"
    assert Case((1000, 250), "stripe").shown() == "1000+250"
