"""The recovery benchmark: what journals come to, the model, and real replicas that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")
pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.__main__ import main
from ftar_core.bench.peers.curve import Curve, Losses, bound, draw, effective_time
from ftar_core.bench.peers.journals import Cost, Run, calm_s, cost, effective, understand
from ftar_core.bench.peers.rows import by_kind, check_pace, row
from ftar_core.bench.report import BenchError

from .runs import rows_of

STEP = 0.2
NAMES = ("r0", "r1", "r2")
Lines = dict[str, list[dict[str, Any]]]


def about(system: str = "ftar", fault: str = "sigkill", **more: Any) -> dict[str, Any]:
    return {
        **{"schema": 1, "system": system, "fault": fault, "replicas": list(NAMES), "wanted": 3, "step_ms": STEP * 1000},
        **{"seed": 1, "notes": "as it comes", "place": "namespaces", "ended": 100.0},
        **more,
    }


def step(number: int, at: float, contributors: int = 3, *, life: int = 1, wait: float = 0.01) -> dict[str, Any]:
    times = {"t_begin": at - STEP, "t_produced": at - wait, "t_commit": at}
    return {"kind": "step", "step": number, "life": life, "contributors": contributors, **times}


def calm(last: int, names: Sequence[str] = NAMES) -> Lines:
    """Steps 1 to `last`, at 0.2 s, 0.4 s, ..."""
    return {name: [step(n, n * STEP) for n in range(1, last + 1)] for name in names}


def marks(at: float, over: float, **more: Any) -> list[Mapping[str, Any]]:
    return [{"kind": "fault", "at": at, "victim": "r2"}, {"kind": "over", "at": over, **more}]


def killed(system: str = "ftar", **more: Any) -> Run:
    """r2 dies at 4.1 s, after step 20; step 21 comes 0.05 s late and is of two; r2 is back in step 25, 0.03 s late."""
    lines = calm(20)
    for name in ("r0", "r1"):
        lines[name] += [step(n, 0.05 + n * STEP, 2, wait=0.06 if n == 21 else 0.01) for n in range(21, 25)]
        lines[name] += [step(n, 0.08 + n * STEP) for n in range(25, 31)]
    lines["r2"] += [step(n, 0.08 + n * STEP, life=2) for n in range(25, 31)]
    return understand(about(system, ended=6.08, **more), marks(4.1, 5.1), lines)


def test_a_kill_costs_what_the_survivors_waited_beyond_a_calm_step() -> None:
    one = cost(killed(), 0)
    assert one is not None
    assert one.stall == pytest.approx(0.05)
    assert one.wait == pytest.approx(0.05)
    assert one.rejoin == pytest.approx(0.03)
    assert one.strength == pytest.approx(5.08 - 4.1)
    assert one.lost == 0


def test_a_step_that_is_thrown_away_is_stall_and_lost() -> None:
    lines = calm(20)
    for name in ("r0", "r1"):
        lines[name] += [{"kind": "thrown", "step": 21, "t_produced": 4.2, "t_begin": 4.0}]
        lines[name] += [step(n, 5.2 + n * STEP, 2) for n in range(21, 25)]
        lines[name] += [step(n, 5.2 + n * STEP) for n in range(25, 30)]
    one = cost(understand(about("torchft"), marks(4.1, 10.3), lines), 0)
    assert one is not None
    assert one.stall == pytest.approx(5.2)
    assert one.wait == pytest.approx(0), "behind the gradients of the step that went well, nothing is seen of it"
    assert one.lost == 1


def test_a_restart_stalls_until_a_new_step_and_loses_those_since_the_checkpoint() -> None:
    lines = calm(25)
    for name in NAMES:  # back from the checkpoint of step 20, at 8 s
        lines[name] += [step(n, 4.0 + n * STEP, life=2) for n in range(21, 40)]
    one = cost(understand(about("restart"), marks(5.1, 8.3), lines), 0)
    assert one == Cost(
        stall=pytest.approx(4.0), wait=pytest.approx(0), rejoin=None, lost=5, strength=pytest.approx(9.2 - 5.1)
    )


def test_who_does_not_come_back_by_itself_has_failed() -> None:
    lines = calm(20)
    for name in NAMES:
        lines[name] += [step(n, 300 + n * STEP, life=2) for n in range(21, 30)]
    run = understand(about("torchft", ended=306.0), marks(4.1, 301.0, failed=True), lines)
    assert cost(run, 0) is None
    found = row([run])
    assert (found["count"], found["failed"], found["stall_s_p50"]) == (1, 1, None)
    assert float(found["effective_time"] or 0) < 0.02


def test_effective_time_counts_new_steps_by_their_contributors() -> None:
    found = effective(killed())
    assert found is not None
    share, mtbf = found
    assert share == pytest.approx(STEP * (4 * 2 / 3 + 6) / (6.08 - 4.1))
    assert mtbf == pytest.approx(6.08 - 4.1)


def test_rows_of_several_runs_are_one_row() -> None:
    groups = by_kind([killed(), killed()], ["ftar"])
    assert list(groups) == [("ftar", "sigkill")]
    found = row(groups["ftar", "sigkill"])
    assert (found["count"], found["failed"], found["steps_lost"]) == (2, 0, 0)
    assert found["stall_s_p50"] == found["stall_s_p95"] == found["stall_s_max"] == 0.05
    assert found["rejoin_stall_s_p95"] == 0.03
    assert found["full_strength_s"] == 0.98
    assert found["mtbf_steps"] == round((6.08 - 4.1) / STEP, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step_ms": 300.0}, "step_ms 200.0 and 300.0"),
        ({"model": "small"}, "model example and small"),
        ({"notes": "tuned"}, "ftar with as it comes; and with tuned"),
    ],
)
def test_journals_of_different_experiments_are_no_row(more: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        by_kind([killed(), killed(**more)], ["ftar"])


def test_a_machine_too_slow_for_the_pace_prints_no_figures() -> None:
    check_pace([killed()])
    assert calm_s(killed()) == pytest.approx(STEP)
    with pytest.raises(BenchError, match="too slow for the pace: ftar takes 200 ms for a step of 160 ms") as error:
        check_pace([killed(step_ms=160.0)])
    assert "--pace 300" in (error.value.hint or "")
    lines = calm(10)
    for name in NAMES:  # calm at first, then something else began to run
        lines[name] += [step(n, 2 + (n - 10) * 2 * STEP) for n in range(11, 40)]
    with pytest.raises(BenchError, match="ftar takes 400 ms for a step of 200 ms"):
        check_pace([understand(about(ended=14.0), [], lines)])


def test_the_model_is_that_of_the_paper() -> None:
    assert effective_time(Losses(10, 0, 0, synchronous=True), 18, 3) == pytest.approx(0.444, abs=0.001)
    assert effective_time(Losses(1, 0.5, 6), 20, 3) == pytest.approx(1 - 1.5 / 20 - 6 / 60)
    assert effective_time(Losses(50, 0, 0), 20, 3) == 0
    assert bound(6, 20, 3) == pytest.approx(0.9)


def test_the_picture_has_a_curve_and_the_measured_points_of_each_system() -> None:
    text = draw(
        "A < B", [Curve("ftar", Losses(0.02, 0, 2), [(7.2, 0.9)]), Curve("restart", Losses(4, 0, 0, True))], 3, 7.2
    )
    root = ElementTree.fromstring(text)
    words = {element.text for element in root.iter()}
    assert {"A < B", "ftar", "restart", "1.8 x restart", "10 s", "100 %"} <= words
    lines = [e for e in root.iter() if e.attrib.get("class", "").endswith(" line")]
    assert [e.attrib["class"] for e in lines] == ["s0 line", "s1 line"]
    assert sum(e.tag.endswith("circle") for e in root.iter()) == 1


def test_rows_are_made_again_from_journals_that_were_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = calm(20)
    for name in ("r0", "r1"):
        lines[name] += [step(n, 0.05 + n * STEP, 2) for n in range(21, 27)] + [step(27, 0.05 + 27 * STEP)]
    lines["r2"] += [step(27, 0.05 + 27 * STEP, life=2)]
    kept = tmp_path / "kept"
    (kept / "one").mkdir(parents=True)
    (kept / "killed-before-it-began").mkdir()
    (kept / "one" / "about.json").write_text(json.dumps(about(ended=5.6)))
    for name, mine in {**lines, "bench": marks(4.1, 5.5)}.items():
        (kept / "one" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in mine) + '{"torn')
    assert main(("recovery", "--from", str(kept), "--svg", str(tmp_path / "it.svg"), "-o", "json")) == 0
    out, err = capsys.readouterr()
    (found,) = json.loads(out)["rows"]
    assert (found["system"], found["count"], found["stall_s_p95"]) == ("ftar", 1, 0.05)
    assert "killed-before-it-began: that run was ended" in err
    ElementTree.fromstring((tmp_path / "it.svg").read_text())
    (kept / "one" / "about.json").write_text("{}")
    assert main(("recovery", "--from", str(kept))) == 1
    assert "of another version of this benchmark" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_named_and_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftar_core.bench import recovery

    monkeypatch.setattr(recovery, "find_spec", lambda _name: None)
    assert recovery.available(["ftar", "torchft", "torchft-tuned", "restart"]) == ["ftar", "restart"]
    assert "torchft and torchft-tuned: torchft is not installed: pip install 'ftctl[bench]'" in capsys.readouterr().err


def mine(word: str) -> list[int]:
    """Processes whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_replicas_of_both_systems_are_killed_and_come_back(tmp_path: Path) -> None:
    rows = rows_of(
        *("recovery", "--systems", "ftar,restart", "--faults", "sigkill", "--count", "1", "--calm", "5"),
        *("--replicas", "2", "--evict-after", "5", "--pace", "300", "--slow-ok", "--out", str(tmp_path / "out")),
    )
    assert [(r["system"], r["count"], r["failed"]) for r in rows] == [("ftar", 1, 0), ("restart", 1, 0)]
    assert rows[0]["steps_lost"] == 0
    assert float(rows[1]["stall_s_p50"]) > 0.1
    for directory in (tmp_path / "out").iterdir():
        assert not list(directory.glob("token")), "secrets do not stay"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_synchronous_job_ends_and_goes_on_however_often_one_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftar_core.bench.peers.drive.MAX_CRASHES", 1)  # each incident has one: who waits in vain
    args = ("--faults", "sigstop", "--count", "2", "--calm", "5", "--replicas", "2", "--model", "small")
    more = ("--pace", "100", "--restart-timeout", "2", "--slow-ok", "--out", str(tmp_path / "out"), "-o", "json")
    assert main(("recovery", "--systems", "restart", *args, *more)) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert (found["count"], found["failed"], found["model"]) == (2, 0, "small")
    assert found["notes"].startswith("collective timeout 2 s")
    assert float(found["stall_s_p50"]) > 1.5, "the others wait for the one that is frozen"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_torchft_goes_through_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'ftctl[bench]'")
    (found,) = rows_of(
        *("recovery", "--systems", "torchft", "--faults", "sigkill", "--count", "1", "--calm", "5"),
        *("--pace", "300", "--slow-ok", "--out", str(tmp_path / "out")),
    )
    assert (found["count"], found["failed"]) == (1, 0)
    assert float(found["stall_s_p50"]) > 1, "its heartbeats time out after 5 s"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_nothing_outlives_a_killed_benchmark(tmp_path: Path) -> None:
    args = ("recovery", "--systems", "ftar", "--count", "1", "--slow-ok", "--out", str(tmp_path / "out"))
    running = subprocess.Popen([sys.executable, "-m", "ftar_core.bench", *args], stderr=subprocess.DEVNULL)
    word = f'"parent": {running.pid}'
    deadline = time.monotonic() + 120
    while not list((tmp_path).glob("out/*/r1.jsonl")):
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.1)
    assert mine(word), "its processes are seen"
    os.kill(running.pid, 9)
    running.wait()
    while mine(word):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_control_plane_that_ends_is_named(tmp_path: Path) -> None:
    args = ("recovery", "--systems", "ftar", "--count", "1", "--slow-ok", "--out", str(tmp_path / "out"))
    running = subprocess.Popen([sys.executable, "-m", "ftar_core.bench", *args], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/*/r1.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (stable,) = mine(f'"parent": {running.pid}}}')[:1]
    children = [int(n) for n in Path(f"/proc/{stable}/task/{stable}/children").read_text().split()]
    os.kill(children[0], 9)  # the first that was started
    _, err = running.communicate()
    assert running.returncode == 1
    assert "ftar: the coordinator has ended with -9" in err
