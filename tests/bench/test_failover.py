"""The failover benchmark: rails of real namespaces fail under checked traffic; and its picture."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.faults import Done, Line, Watch, longest_gap_ms, recognised_ms, understood
from ftar_core.bench.svg import Mark, Panel, Span, draw

from .runs import rows_of

MS = 1_000_000


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_faults_under_traffic_cost_no_byte_and_are_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "failover.svg"
    rows = rows_of("failover", "--faults", "none,carrier,silent", "--count", "1", "--svg", str(picture))
    assert [row["fault"] for row in rows] == ["none", "carrier", "silent"]
    for row in rows:
        assert row["count"] == 1
        assert row["bytes_checked"] > 0
        assert row["bytes_wrong"] == 0
        assert row["gap_ms_p50"] <= row["gap_ms_p99"] <= row["gap_ms_max"]
        if row["fault"] == "none":
            assert row["detect_ms_p50"] is row["detect_ms_p99"] is None
        else:
            assert 0 < row["detect_ms_p50"] <= row["detect_ms_p99"]
    words = {element.text for element in ElementTree.fromstring(picture.read_text()).iter()}
    assert {"fails", "repaired", "rail0", "rail1"} <= words


def watched(*lines: tuple[int, int, int, str]) -> Watch:
    watch = Watch(pair=None)  # type: ignore[arg-type]
    watch.lines = [Line(ms * MS, node, rail, says, "") for ms, node, rail, says in lines]
    return watch


def test_a_fault_is_recognised_when_a_node_knows_it_on_all_its_connections() -> None:
    done = Done(begun_ns=100 * MS, repaired_ns=200 * MS, rails=(0,))
    early = (90, 0, 0, "DOWN")  # of the fault before
    watch = watched(early, (101, 0, 0, "DOWN"), (103, 0, 0, "DOWN"), (102, 1, 0, "DOWN"), (110, 1, 0, "DOWN"))
    assert recognised_ms(watch, done, 2) == (3, 10)
    assert recognised_ms(watch, done, 3) == (None, None)
    assert recognised_ms(watched((104, 1, 0, "DOWN"), (101, 0, 1, "DOWN")), done, 1) == (4, None)
    both = Done(100 * MS, 200 * MS, (0, 1))
    assert recognised_ms(watched((101, 0, 0, "DOWN"), (105, 0, 1, "DOWN")), both, 1) == (5, None)
    assert recognised_ms(watched((101, 0, 0, "DOWN")), both, 1) == (None, None)


def test_a_line_that_was_written_late_counts_from_when_it_was_said() -> None:
    line = understood(100 * MS, 1, "NET/FTAR : to 10.0.0.2 by rail1: DOWN: rail1 has no carrier (12.5 ms ago)")
    assert line is not None
    assert (line.ns, line.node, line.rail, line.says) == (87_500_000, 1, 1, "DOWN")
    assert understood(100 * MS, 0, "NET/FTAR : from 10.0.0.2 by rail0: UP: hold-down is over").ns == 100 * MS  # type: ignore[union-attr]
    assert understood(100 * MS, 0, "NET/FTAR : devices: 0 rail0 (10.0.0.2)") is None


def test_the_gap_of_a_fault_is_the_longest_that_touches_it() -> None:
    gaps = [(0, 10 * MS, 90 * MS), (1, 95 * MS, 105 * MS), (2, 150 * MS, 170 * MS), (0, 201 * MS, 300 * MS)]
    assert longest_gap_ms(gaps, 100 * MS, 200 * MS) == 20
    assert longest_gap_ms([], 100 * MS, 200 * MS) == 0


def test_the_picture_is_an_svg_for_both_themes() -> None:
    panel = Panel(
        title="A < B",
        values=[1.0, 1.0, 0.0, 1.0],
        bin_ms=10,
        top=1.25,
        unit="Gbit/s",
        spans=[Span(0, 20, "rail0", 0), Span(20, 40, "rail1", 1)],
        marks=[Mark(20, "fails"), Mark(21, "moved"), Mark(30, "repaired")],
    )
    text = draw("throughput", [panel, panel])
    root = ElementTree.fromstring(text)
    assert "A < B" in {element.text for element in root.iter()}
    assert "prefers-color-scheme: dark" in text
    _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
    for element in root.iter():
        assert 0 <= float(element.attrib.get("x", 0)) <= width
        assert 0 <= float(element.attrib.get("y", 0)) <= height
