"""Objectives against what was measured; and what was measured, from journals written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftctl.lab.journal import Journal, Journals, Line
from ftctl.lab.layout import LabOptions, nodes
from ftctl.lab.paths import LabPaths
from ftctl.lab.traffic import Traffic
from ftctl.playbook import measuring
from ftctl.playbook.judging import judge, percentile
from ftctl.playbook.measuring import Cost, Window
from ftctl.playbook.objectives import Objectives
from ftctl.playbook.pace import MOST, Pace
from ftctl.playbook.verdict import _corrupted

COST = Cost(0, "proc-kill", "r1", 0, detect_ms=30.0, stall_ms=100.0, rejoin_s=3.0, steps_lost=0.0)


def judged(objectives: object, *costs: Cost, **whole: float | None) -> dict[str, tuple[float | None, bool, str]]:
    found = judge(Objectives.model_validate(objectives), costs, whole=whole, why_not={"loss_delta": "nobody said"})
    return {j.name: (j.measured, j.met, j.reason) for j in found}


def test_an_objective_is_met_by_the_worst_incident() -> None:
    costs = (COST, replace(COST, stall_ms=250.0))
    assert judged({"stall_ms": {"max": 250}}, *costs)["stall_ms max"] == (250.0, True, "")
    assert judged({"stall_ms": {"max": 249, "p50": 100}}, *costs) == {
        "stall_ms p50": (100.0, True, ""),
        "stall_ms max": (250.0, False, ""),
    }


def test_what_was_not_measured_meets_nothing_and_says_why() -> None:
    blind = replace(COST, stall_ms=None, missing={"stall_ms": "only 2 calm steps"})
    assert judged({"stall_ms": {"max": 250}}, COST, blind)["stall_ms max"] == (100.0, False, "only 2 calm steps")
    assert judged({"stall_ms": {"max": 250}})["stall_ms max"] == (None, False, "no incident to measure it of")
    assert judged({"loss_delta": {"max": 1}}, COST)["loss_delta max"] == (None, False, "nobody said")
    assert judged({"effective_time": {"min": 0.9}}, COST)["effective_time min"] == (None, False, "not measured")


def test_a_rejoin_is_asked_of_those_who_left() -> None:
    rail = replace(COST, what="link-down", rejoin_s=None)
    assert judged({"rejoin_s": {"max": 5}}, rail, COST)["rejoin_s max"] == (3.0, True, "")
    assert not judged({"rejoin_s": {"max": 5}}, rail)["rejoin_s max"][1], "nobody came back, so nothing is proven"


def test_limits_of_times_are_for_a_machine_that_keeps_its_pace() -> None:
    limits = Objectives.model_validate(
        {"stall_ms": {"max": 50}, "steps_lost": {"max": 0}, "loss_delta": {"max": 1}, "effective_time": {"min": 0.9}}
    )
    costs = (replace(COST, steps_lost=1.0),)
    found = judge(limits, costs, whole={"loss_delta": 1.5, "effective_time": 0.75}, why_not={}, slower=3.0)
    assert {j.name: (j.met, round(j.allowed, 6)) for j in found} == {
        "stall_ms max": (True, 150),
        "steps_lost max": (False, 0),
        "loss_delta max": (False, 1),
        "effective_time min": (True, 0.7),
    }


def test_bytes_are_known_to_be_right_only_where_every_rank_has_checked_some(tmp_path: Path) -> None:
    paths = LabPaths(tmp_path)
    paths.journal.mkdir(parents=True)

    def said(node: str, *, checked: int, wrong: int) -> None:
        zeros = dict.fromkeys(("rounds", "messages_sent", "bytes_sent", "messages_checked"), 0)
        told = {"bytes_checked": checked, "bytes_wrong": wrong, "first_wrong": "", "longest_ms": 0.0}
        one = Traffic(rank=0, pid=1, state="running", time=0.0, **zeros, **told)  # type: ignore[arg-type]
        (paths.journal / f"{node}.json").write_bytes(msgspec.json.encode(one))

    options = LabOptions(job="nccl", replicas=2)
    lab: Any = SimpleNamespace(paths=paths, manifest=SimpleNamespace(options=options), nodes=nodes(options))
    said("node0", checked=100, wrong=0)
    assert _corrupted(lab) == (None, "the rank of node1 has checked nothing")
    said("node1", checked=0, wrong=0)
    assert _corrupted(lab) == (None, "the rank of node1 has checked nothing")
    said("node1", checked=100, wrong=3)
    assert _corrupted(lab) == (3.0, "")
    assert _corrupted(None)[0] is None


def test_the_pace_is_that_of_undisturbed_steps() -> None:
    pace = Pace(200)
    assert pace.slower == 1
    for step_ms in (210.0, 900.0, 600.0, None, 580.0, 600.0):
        pace.saw(step_ms)
    assert pace.slower == 3
    pace.disturbed = True
    for _ in range(100):
        pace.saw(5000.0)
    assert pace.slower == 3, "what an incident does to a step is no slow machine"
    usual, unknown, frozen = Pace(200), Pace(0), Pace(1)
    for some in (usual, unknown, frozen):
        some.saw(250.0)
    assert (usual.slower, unknown.slower, frozen.slower) == (1, 1, MOST)


def test_shares_have_a_least() -> None:
    assert judged({"effective_time": {"min": 0.9}}, effective_time=0.95)["effective_time min"][1]
    assert not judged({"effective_time": {"min": 0.9}}, effective_time=0.85)["effective_time min"][1]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([50.0, 95.0, 99.0, 100.0]))
def test_a_percentile_is_a_measured_value_with_so_many_below(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) >= len(values) * percent / 100.0
    assert sum(v < found for v in values) < len(values) * percent / 100.0


# --- a job of three replicas, a step every 0.2 s, r1 away from step 31 to 39 ------------------------------------------


def line(step: int, replica: str, contributors: tuple[str, ...], late: float = 0.0) -> Line:
    produced = 100.0 + step * 0.2
    return Line(
        kind="step",
        mono=produced,
        step=step,
        contributors=contributors,
        retries=int(bool(late)),
        t_produced=produced,
        t_commit=produced + 0.01 + late,
        loss=3.0,
    )


def a_loss() -> Journals:
    """r1 is killed in step 31, at 106.2 s; the survivors know 50 ms later and commit 90 ms later than usual."""
    every, two = ("r0", "r1", "r2"), ("r0", "r2")
    found = {}
    for name in every:
        lines = [line(step, name, every) for step in range(1, 31)]
        if name == "r1":
            lines += [Line(kind="start", mono=107.0, incarnation=2)]
        else:
            lines += [line(31, name, two, late=0.09), Line(kind="epoch", mono=106.25, contributors=two, retry=True)]
            lines += [line(step, name, two) for step in range(32, 40)]
            lines += [Line(kind="epoch", mono=108.0, contributors=every)]
        lines += [line(step, name, every) for step in range(40, 50)]
        found[name] = Journal(name, tuple(lines))
    return Journals(found)


WINDOW = Window(0, "proc-kill", "r1", "", "r1 on node1", 0, 106.2, 109.9, 1000.0, 1003.7)


def test_the_cost_of_a_death_is_read_from_the_survivors_journals() -> None:
    cost = measuring.from_journals(a_loss(), WINDOW, ["r0", "r1", "r2"])
    assert cost.detect_ms == pytest.approx(50.0)
    assert cost.stall_ms == pytest.approx(90.0)
    assert cost.rejoin_s == pytest.approx(100 + 40 * 0.2 + 0.01 - 106.2)
    assert cost.steps_lost == 0
    assert not cost.missing


def test_an_incident_that_takes_nobody_out_has_no_rejoin() -> None:
    calm = replace(WINDOW, what="link-down", nic="rail0", start=109.0)
    cost = measuring.from_journals(a_loss(), calm, ["r0", "r1", "r2"])
    assert (cost.detect_ms, cost.rejoin_s) == (None, None)
    assert cost.stall_ms == pytest.approx(0.0)


def test_a_window_ends_where_the_next_incident_begins() -> None:
    def record(kind: str, mono: float, **more: object) -> dict[str, object]:
        return {"kind": kind, "mono": mono, "time": mono + 1000, **more}

    aim = {"node": "node1", "nic": "rail0", "replica": "r1", "rank": None, "repeat": 0}
    records = [
        record("run", 0.0),
        record("incident", 1.0, number=0, what="link-down", **aim),
        record("incident", 1.0, number=1, what="link-down", **aim),
        record("incident", 5.0, number=2, what="proc-kill", **{**aim, "nic": "", "rank": 1}),
        record("sample", 9.0),
        record("verdict", 10.0),
    ]
    found = measuring.windows(records)
    assert [(w.start, w.end) for w in found] == [(1.0, 5.0), (1.0, 5.0), (5.0, 9.0)]
    assert [w.aim for w in found][1:] == ["r1 on node1/rail0", "r1 rank 1 on node1"]
