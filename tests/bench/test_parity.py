"""`bench parity`: the plan of a storm, rows from journals, wrong input; and a small real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.__main__ import main
from ftar_core.bench.board import NO_LIMIT, Board
from ftar_core.bench.parity_plan import POINTS, STORMS, Fate, Storm, Strike, drain_steps, parse_storm, strikes
from ftar_core.bench.parity_plot import draw_parity
from ftar_core.bench.parity_raw import read_all, read_run
from ftar_core.bench.parity_rows import rows
from ftar_core.bench.parity_run import Case, Task
from ftar_core.bench.report import UsageError

from .runs import rows_of

REPLICAS = ("r0", "r1", "r2")
TASK = Task(3, 20 * 3 * 2 * 64, 2, 1e-3, 1, 4, 16, 64)

# --- the plan


def test_a_plan_is_of_its_seed_and_nothing_else() -> None:
    storm = STORMS["many"]
    plan = list(islice(strikes(storm, REPLICAS, 7), 50))
    assert plan == list(islice(strikes(storm, REPLICAS, 7), 50))
    assert plan != list(islice(strikes(storm, REPLICAS, 8), 50))
    gaps = [b.step - a.step for a, b in pairwise(plan)]
    assert 0.75 * storm.every <= min(gaps) < max(gaps) <= 1.25 * storm.every
    assert {point for strike in plan for point in strike.points} == set(POINTS)
    assert {strike.order[0] for strike in plan} == set(REPLICAS)


@pytest.mark.parametrize(
    ("contributors", "down", "victims"),
    [
        (("r0", "r1", "r2"), 1, {"r2"}),
        (("r0", "r1", "r2"), 2, {"r2", "r0"}),
        (("r0", "r1", "r2"), 3, {"r2", "r0"}),  # somebody has to go on
        (("r1", "r0"), 2, {"r0"}),
        (("r1",), 1, set()),
    ],
)
def test_the_last_one_never_dies(contributors: tuple[str, ...], down: int, victims: set[str]) -> None:
    strike = Strike(10, ("r2", "r0", "r1"), ("update",) * down, down)
    assert set(strike.hits(contributors)) == victims


def test_all_replicas_decide_alike_and_nobody_pays_for_a_strike_before_its_life() -> None:
    strike = Strike(10, ("r2", "r0", "r1"), ("update", "reduced"), 2)
    fates = [Fate(iter([strike])) for _ in REPLICAS]
    for step in range(1, 10):
        assert all(fate.at(step, REPLICAS) == {} for fate in fates)
    assert [fate.at(10, REPLICAS) for fate in fates] == [{"r2": "update", "r0": "reduced"}] * 3
    assert all(fate.at(11, REPLICAS) == {} for fate in fates)
    assert Fate(iter([strike])).at(12, REPLICAS) == {}, "of a life that begins later"
    assert Fate(iter([strike])).at(10, REPLICAS), "of one that begins with it"
    idle = Fate(iter([strike]))  # had no batch at step 10, at which r2 has died
    idle.at(9, REPLICAS)
    assert idle.at(11, ("r0", "r1")) == {"r0": "update"}


def test_drains_are_planned_by_the_seed() -> None:
    plan = list(islice(drain_steps(REPLICAS, 3, 40), 30))
    assert plan == list(islice(drain_steps(REPLICAS, 3, 40), 30))
    assert {who for _, who in plan} == {0, 1, 2}
    assert [step for step, _ in plan] == sorted(step for step, _ in plan)


@pytest.mark.parametrize("text", ["sunny", "60/20", "3/2/1", "60/1/1", "60/20/0", "9999999/2/1", ""])
def test_what_is_no_storm(text: str) -> None:
    with pytest.raises(ValueError, match=r"steps|60/20/1"):
        parse_storm(text)


def test_storms_by_name_and_by_numbers() -> None:
    assert parse_storm("often") is STORMS["often"]
    assert parse_storm("60/20/2") == Storm("60/20/2", 60, 20, 2)


def test_a_board_is_what_all_see(tmp_path: Path) -> None:
    mine = Board(tmp_path / "board", REPLICAS, new=True)
    theirs = Board(tmp_path / "board", REPLICAS)
    assert (theirs.limit, theirs.pause_ms, theirs.furthest()) == (NO_LIMIT, 0, 0)
    mine.limit, mine.pause_ms = 12, 40
    theirs.works_on("r1", 11)
    theirs.arrived("r1", 4711)
    assert (theirs.limit, theirs.pause_ms) == (12, 40)
    assert (mine.step("r1"), mine.furthest(), mine.step("r0")) == (11, 11, 0)
    assert mine.has_arrived("r1", 4711)
    assert not mine.has_arrived("r0", 4711)
    mine.close()
    theirs.close()


# --- rows from what runs have left behind


def keep(
    directory: Path,
    case: Case,
    loss: float,
    *,
    digest: str = "d",
    away: tuple[int, ...] = (),
    spoil: dict[str, Any] | None = None,
    task: Task = TASK,
) -> Path:
    """A run: r2 is away at those steps. `spoil` changes the line of the last step."""
    place = directory / case.directory
    (place / "journal").mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    batch, step = 0, 0
    while batch < 60:
        step += 1
        names = REPLICAS[:2] if step in away else REPLICAS
        batches = {name: batch + i for i, name in enumerate(names) if batch + i < 60}
        batch += len(batches)
        line = {"kind": "step", "step": step, "contributors": list(names), "batches": batches, "replayed": False}
        lines.append({**line, "loss": 5.0 - batch / 60, "tokens": 128 * len(batches)})
    lines[-1].update(spoil or {})
    end = {"kind": "end", "step": step, "params_digest": digest, "optimizer_digest": "o"}
    for name in REPLICAS:
        mine = [*(line for line in lines if name in line["contributors"]), end]
        text = "".join(json.dumps(line) + "\n" for line in mine)
        (place / "journal" / f"{name}.jsonl").write_text(text + '{"kind": "st')  # torn by a kill
    failures = [{"replica": "r2", "step": step, "kind": "kill"} for step in away[:1]]
    run = {"schema": 1, "bench": "parity", "task": asdict(task), "case": asdict(case), "held_out_loss": loss}
    (place / "run.json").write_text(json.dumps({**run, "failures": failures, "restarts": 0, "seconds": 1.0}))
    return place


def keep_all(directory: Path, stormy: float) -> None:
    for seed, loss in enumerate((2.0, 2.1, 2.2, 2.3), 1):
        keep(directory, Case("calm", "none", seed), loss)
        keep(directory, Case("some", "none", seed), loss + stormy + seed * 0.001, away=(5, 6, 7))
        keep(directory, Case("drains", "none", seed), loss)


def test_rows_compare_with_the_calm_runs_of_the_same_seeds(tmp_path: Path) -> None:
    keep_all(tmp_path, 0.01)
    calm, drains, some = rows(read_all([tmp_path]))
    assert (calm["setting"], calm["verdict"], calm["loss_mean"], calm["loss_sd"]) == (
        "calm",
        "the measure",
        2.15,
        0.129099,
    )
    assert (drains["verdict"], drains["failures"]) == ("bit-identical", 0)
    assert (some["seeds"], some["failures"], some["tokens"]) == (4, 4, TASK.tokens)
    assert some["contributors_mean"] == pytest.approx(60 / 21, abs=1e-3)
    assert (some["difference"], some["calm_loss_mean"], some["margin"]) == (0.0125, 2.15, 0.129099)
    assert some["ci_low"] < 0.0125 < some["ci_high"]  # type: ignore[operator]
    assert some["verdict"] == "equivalent"
    assert some["train_loss_mean"] == pytest.approx(4.05, abs=0.03), "the last tenth: from 4.1 to 4"
    (_, _, strict) = rows(read_all([tmp_path]), margin=0.005)
    assert (strict["verdict"], strict["margin"]) == ("worse", 0.005)


def test_runs_of_several_directories_are_one_measurement(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    keep(first, Case("calm", "none", 1), 2.0)
    keep(second, Case("calm", "none", 2), 2.1)
    (row,) = rows(read_all([first, second]))
    assert (row["seeds"], row["loss_sd"]) == (2, 0.070711)
    keep(second, Case("calm", "none", 1), 2.0)
    with pytest.raises(UsageError, match="is the same run"):
        read_all([first, second])


def test_runs_of_two_tasks_are_not_compared(tmp_path: Path) -> None:
    keep(tmp_path, Case("calm", "none", 1), 2.0)
    keep(tmp_path, Case("calm", "none", 2), 2.0, task=replace(TASK, layers=2))
    with pytest.raises(UsageError, match="layers="):
        read_all([tmp_path])


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([("calm", 1, "a", ()), ("drains", 1, "b", ())], "different bits: seed 1"),
        (
            [("calm", 1, "a", ()), ("drains", 1, "b", (4,))],
            "not comparable: other contributors in 1 (seed 1 from step 4)",
        ),
        (
            [("calm", 1, "a", ()), ("drains", 1, "a", ()), ("calm", 2, "a", ()), ("drains", 2, "b", (4,))],
            "bit-identical in 1 of 2, other contributors in 1 (seed 2 from step 4)",
        ),
        ([("drains", 1, "a", ())], "no calm run of these seeds"),
        ([("calm", 1, "a", ()), ("some", 1, "a", ())], "1 seed with a calm run: at least 2 are needed"),
    ],
)
def test_verdicts_of_drains(tmp_path: Path, runs: list[tuple[str, int, str, tuple[int, ...]]], verdict: str) -> None:
    for setting, seed, digest, away in runs:
        keep(tmp_path, Case(setting, "none", seed), 2.0, digest=digest, away=away)
    assert rows(read_all([tmp_path]))[-1]["verdict"] == verdict


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"batches": {"r0": 0, "r1": 1, "r2": 2}}, "3 batches were never trained, 3 more than once"),
        ({"step": 40}, "steps are missing"),
    ],
)
def test_a_run_that_lost_something_does_not_count(tmp_path: Path, spoil: dict[str, Any], said: str) -> None:
    keep(tmp_path, Case("calm", "none", 1), 2.0, spoil=spoil)
    (row,) = rows(read_all([tmp_path]))
    assert str(row["verdict"]).startswith(f"does not count: seed 1: {said}")


def test_a_run_whose_replicas_differ_does_not_count(tmp_path: Path) -> None:
    place = keep(tmp_path, Case("calm", "none", 1), 2.0)
    journal = place / "journal" / "r1.jsonl"
    journal.write_text(journal.read_text().replace('"params_digest": "d"', '"params_digest": "e"'))
    assert "different bits at the end" in read_run(place).problem


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"bench": "parity", "schema": 99}'])
def test_a_damaged_run_is_named(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = keep(tmp_path, Case("calm", "none", 1), 2.0)
    (place / "run.json").write_text(text)
    assert main(("parity", "--from", str(tmp_path))) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"error: {place}: ")) == ("", True)


def test_the_picture_shows_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_all(tmp_path, 0.01)
    picture = tmp_path / "parity.svg"
    assert main(("parity", "--from", str(tmp_path), "--svg", str(picture))) == 0
    assert "equivalent" in capsys.readouterr().out
    elements = list(ElementTree.fromstring(picture.read_text()).iter())
    words = " ".join(element.text or "" for element in elements)
    assert "some" in words
    assert "equivalent" in words
    assert sum(element.get("class") == "c0 area" for element in elements) == 4, "a dot a seed"
    assert "nan" not in draw_parity(read_all([tmp_path]))


# --- wrong input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--seeds", "1"), "--seeds: from 2"),
        (("--tokens", "100"), "--tokens: at least 7680"),
        (("--replicas", "1"), "--replicas"),
        (("--storms", "sunny"), "--storms: 'sunny'"),
        (("--storms", "60/20/3"), "leaves nobody"),
        (("--batch", "huge"), "--batch: 'huge'; there are none"),
        (("--width", "30"), "--width"),
        (("--layers", "0"), "--layers"),
        (("--margin", "nan"), "--margin"),
        (("--out", "/nowhere/at/all"), "no directory /nowhere/at"),
        (("--svg", "/nowhere/at/all.svg"), "no directory /nowhere/at"),
        (("--from", "/nowhere"), "/nowhere: no such directory"),
        (("--out", "/tmp/x", "--from", "/tmp"), "--out and --from"),
    ],
)
def test_wrong_input_is_named(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("parity", *args)) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("error: ")) == ("", True)
    assert said in err


def test_runs_of_other_options_are_not_mixed_with_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, Case("calm", "none", 1), 2.0)
    assert main(("parity", "--out", str(tmp_path))) == 2
    assert "its runs have tokens=7680, not 115200" in capsys.readouterr().err


# --- a real one


def _family(pid: int) -> list[int]:
    """All processes below this one."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.soak
def test_a_real_storm_and_real_drains(tmp_path: Path) -> None:
    """Two replicas of a small model; a second call finds the runs that are there."""
    small = ("--replicas", "2", "--layers", "1", "--width", "16", "--tokens", str(60 * 2 * 2 * 64), "--seeds", "2")
    args = (*small, "--storms", "20/5/1,drains", "--out", str(tmp_path))
    made = rows_of("parity", *args)
    assert [(row["batch"], row["setting"]) for row in made] == [
        (batch, setting) for batch in ("none", "global_batch") for setting in ("calm", "20/5/1", "drains")
    ]
    for row in made:
        assert row["tokens"] == 60 * 2 * 2 * 64
        if row["setting"] == "calm":
            assert (row["contributors_mean"], row["failures"]) == (2, 0)
        elif row["setting"] == "drains":
            assert row["verdict"] == "bit-identical"
            assert row["failures"]
        else:
            assert row["verdict"] in ("equivalent", "undecided", "better", "worse")
            assert row["failures"] >= 4
            assert 1 < row["contributors_mean"] < 2
    assert rows_of("parity", *args) == made
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.soak
def test_whoever_kills_the_benchmark_ends_all_of_it(tmp_path: Path) -> None:
    small = ["--replicas", "2", "--layers", "1", "--width", "16"]
    args = [*small, "--storms", "20/5/1", "--out", str(tmp_path)]
    bench = subprocess.Popen([sys.executable, "-m", "ftar_core.bench", "parity", *args], stdout=subprocess.DEVNULL)
    try:
        _until(lambda: list(tmp_path.glob(".*.part/journal/r1.jsonl")))
        family = _family(bench.pid)
        assert len(family) >= 4, "the coordinator, the parent of the replicas, two replicas"
    finally:
        bench.kill()
        bench.wait()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
