"""What is kept of chaos runs: reports, comparisons, lists; also where a disk or a lab is in the way."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftctl import yamlfile
from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode
from ftctl.lab import lifecycle
from ftctl.playbook import conduct

from .conftest import BOOK, Run
from .fake_agent import FakeCluster


def injected(cluster: FakeCluster) -> int:
    return sum(len(agent.faults) for agent in cluster.agents.values())


def test_reports_of_a_run_whose_controller_died(ftctl: Run, bare: Run, book: Path, folder: Path) -> None:
    assert ftctl("chaos", "run", str(book)).code == 0
    (directory,) = (folder / "state" / "chaos").glob("*-unplug*")
    journal = directory / "journal.jsonl"
    lines = journal.read_text().splitlines()[:-1]
    journal.write_text("\n".join(lines) + '\n{"kind": "verd')
    result = bare("chaos", "report", str(directory))
    assert result.code == 1
    assert "cut off" in result.out
    assert bare("chaos", "report", str(directory), "--html", str(folder / "r.html")).code == 1
    page = (folder / "r.html").read_text()
    assert "the controller died before the end" in page
    assert "src=" not in page, "nothing is loaded from anywhere"


def test_a_regression_is_found_and_a_slow_machine_is_not_taken_for_one(
    ftctl: Run, bare: Run, book: Path, folder: Path
) -> None:
    assert ftctl("chaos", "run", str(book)).code == 0
    (old,) = (folder / "state" / "chaos").glob("*-unplug*")

    def with_cost(name: str, stall_ms: float, step_ms: float) -> str:
        directory = folder / name
        directory.mkdir()
        cost = {"kind": "measured", "time": 0, "mono": 0, "incident": 0, "what": "x", "aim": "", "stall_ms": stall_ms}
        sample = {"kind": "sample", "time": 0, "mono": 0, "step_ms": step_ms}
        text = (old / "journal.jsonl").read_text()
        kept = [line for line in text.splitlines() if '"measured"' not in line and '"sample"' not in line]
        (directory / "journal.jsonl").write_text("\n".join([*kept, json.dumps(cost), json.dumps(sample)]) + "\n")
        return str(directory)

    before, worse, slow = with_cost("a", 100, 200), with_cost("b", 400, 205), with_cost("c", 190, 400)
    result = bare("chaos", "compare", before, worse, "-o", "json")
    assert result.code == 1
    assert {row["measure"]: row["judgement"] for row in result.json()["rows"]}["stall_ms p50"] == "worse"
    result = bare("chaos", "compare", before, slow, "-o", "json")
    assert result.code == 0
    judged = {row["measure"]: row["judgement"] for row in result.json()["rows"]}
    assert judged["step_ms"] == judged["stall_ms max"] == "machine slower"
    assert bare("chaos", "compare", before, with_cost("d", 900, 400)).code == 1, "by more than the machine"
    assert bare("chaos", "compare", before, before).code == 0


def test_lists_and_schema(bare: Run, book: Path, folder: Path) -> None:
    assert "A rail goes down." in bare("chaos", "list", str(book.parent)).out
    assert bare("chaos", "list", str(book.parent), "--tag", "slow").code == 2
    schema = json.loads(bare("chaos", "schema").out)
    assert schema["additionalProperties"] is False
    assert {"inject", "drain", "storm"} <= {key for d in schema["$defs"].values() for key in d.get("properties", {})}
    assert bare("chaos", "validate", str(book)).code == 0
    noted = book.with_name("noted.yaml")
    noted.write_text(book.read_text().replace("method:\n", "method:\n  - {expect: replicas.contributing == 3}\n"))
    result = bare("chaos", "validate", str(noted))
    assert result.code == 0
    assert result.err.startswith(f"note: {noted}:")
    noted.unlink()
    book.write_text("version: 1\n")
    assert bare("chaos", "validate", str(book)).code == 2
    assert bare("chaos", "init", str(book)).code == 2, "nothing is overwritten"


def test_a_report_that_cannot_be_written_is_said_before_anything_is_done(
    ftctl: Run, cluster: FakeCluster, book: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, path, word in (
        ("--junit", folder / "no" / "j.xml", "its directory is not there"),
        ("--markdown", folder, "is a directory"),
        ("--html", folder / "r.html", "jinja2 is not installed"),
    ):
        if option == "--html":
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        result = ftctl("chaos", "run", str(book), option, str(path))
        assert result.code == 2
        assert word in result.err
    assert injected(cluster) == 0


def test_a_report_that_fails_hides_no_verdict_and_no_other_report(
    ftctl: Run, book: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.write_text(BOOK + "  - {expect: replicas.contributing == 9}\n")
    written = Path.write_text

    def full(path: Path, text: str, encoding: str = "utf-8") -> int:
        if path.name == "j.xml":
            raise OSError(28, "No space left on device")
        return written(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", full)
    result = ftctl("chaos", "run", str(book), "--junit", str(folder / "j.xml"), "--markdown", str(folder / "s.md"))
    assert result.code == 1
    assert "unplug" in result.out
    assert "replicas.contributing == 9 was expected" in result.err
    assert "j.xml: No space left on device" in result.err
    assert "0 of 1 playbooks passed" in (folder / "s.md").read_text()


def test_a_lab_that_does_not_go_loses_no_run_that_is_over(
    bare: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCTL_STATE_DIR", str(folder / "state"))
    book = folder / "unplug.yaml"
    book.write_text(BOOK)

    def lost(*_args: object, finished: list[conduct.Finished], **_more: object) -> None:
        finished.append(conduct.Finished("unplug", run, "passed", ExitCode.OK, "", ""))
        raise CliError("lab x", "still there: a namespace", "ftctl lab down --name x")

    run = folder / "run"
    run.mkdir()
    (run / "journal.jsonl").write_text('{"kind": "run", "schema": 1, "name": "unplug", "time": 0, "mono": 0}\n')
    monkeypatch.setattr(conduct, "in_labs", lost)
    result = bare("chaos", "run", str(book), "--lab", "--markdown", str(folder / "s.md"))
    assert result.code == 1
    assert "still there" in result.err
    assert "unplug" in result.out
    assert (folder / "s.md").exists()

    def stopped(*_args: object, finished: list[conduct.Finished], **_more: object) -> None:
        finished.append(conduct.Finished("unplug", run, "passed", ExitCode.OK, "", ""))
        raise KeyboardInterrupt

    (folder / "second.yaml").write_text(BOOK.replace("unplug", "second"))
    monkeypatch.setattr(conduct, "in_labs", stopped)
    result = bare("chaos", "run", str(book), str(folder / "second.yaml"), "--lab", "--junit", str(folder / "j.xml"))
    assert result.code == 130
    assert "not run: second" in result.err
    assert (folder / "j.xml").exists()


def test_closed_streams_are_no_error(folder: Path) -> None:
    """`ftctl ... 2>&-`: what would be said is said to nobody, and no file gets its number."""
    book = folder / "unplug.yaml"
    book.write_text(BOOK)
    for closed in ("2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"):
        command = f"{sys.executable} -m ftctl chaos validate {book} {closed}"
        assert subprocess.run(["bash", "-c", command], timeout=120, check=False).returncode == 0, closed


def test_labs_whose_agents_remember_what_they_did_are_nobody_elses() -> None:
    plain, acting = lifecycle.LabOptions(name="a"), lifecycle.LabOptions(name="a", policy="act")
    assert conduct._same(plain, lifecycle.LabOptions(name="b"))
    assert not conduct._same(acting, lifecycle.LabOptions(name="b", policy="act"))


def test_a_pipe_that_nobody_writes_into_keeps_nobody_waiting(
    bare: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yamlfile, "PIPE_S", 0.2)
    pipe = folder / "p.yaml"
    os.mkfifo(pipe)
    result = bare("chaos", "validate", str(pipe))
    assert result.code == 2
    assert "nothing came out of it" in result.err
    os.mkfifo(folder / "journal.jsonl")
    assert bare("chaos", "report", str(folder)).code == 2
    reading, writing = os.pipe()
    os.write(writing, BOOK.encode())
    os.close(writing)
    assert bare("chaos", "validate", f"/dev/fd/{reading}").code == 0, "as <(command) gives it"
    os.close(reading)
