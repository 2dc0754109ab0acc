"""A run as its journal tells it, for reports. A journal without a verdict is that of a controller that died."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ftctl.errors import UsageProblem
from ftctl.exit_codes import ExitCode
from ftctl.playbook.conduct import runs_dir
from ftctl.playbook.journal import Record, read, written


@dataclass(frozen=True)
class Run:
    """Times in `records` are absolute; `start` is the first record's, Unix and monotonic."""

    directory: Path
    name: str
    head: Record
    records: list[Record]
    verdict: Record | None
    costs: list[Record] = field(default_factory=list)
    running: bool = False

    @property
    def passed(self) -> bool:
        return self.verdict is not None and bool(self.verdict.get("passed"))

    @property
    def word(self) -> str:
        return str(self.verdict["word"]) if self.verdict else "running" if self.running else "cut off"

    @property
    def reason(self) -> str:
        if self.running:
            return "it is not over yet"
        if self.verdict is None:
            return "the controller died before the end; its agents took the faults back"
        return str(self.verdict.get("reason") or "")

    @property
    def objectives(self) -> list[dict[str, Any]]:
        return list(self.verdict.get("objectives") or []) if self.verdict else []

    @property
    def seconds(self) -> float:
        if self.verdict is not None:
            return float(self.verdict.get("seconds") or 0.0)
        return float(self.records[-1]["time"] - self.records[0]["time"])

    @property
    def code(self) -> ExitCode:
        return ExitCode(int(self.verdict["code"])) if self.verdict else ExitCode.IN_FORCE

    @property
    def slower(self) -> float:
        """How many times the machine was slower than its pace; 1: it kept it, or nobody knows."""
        return float(self.verdict.get("slower") or 1.0) if self.verdict else 1.0

    @property
    def calm_ms(self) -> float | None:
        """The usual length of a step before anything was done to the job."""
        first = next((record["mono"] for record in self.of("incident")), float("inf"))
        steps = [s for s in self.of("sample") if s.get("step_ms") is not None]
        calm = [float(s["step_ms"]) for s in steps if s["mono"] < first]
        return median(calm or [float(s["step_ms"]) for s in steps]) if steps else None

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def since(self, record: Record) -> float:
        """Seconds from the beginning of the run, by the controller's monotonic clock."""
        return float(record["mono"] - self.records[0]["mono"])


def read_run(path: Path) -> Run:
    """Raises UsageProblem."""
    records = read(path)
    verdict = next((record for record in reversed(records) if record["kind"] == "verdict"), None)
    costs = [record for record in records if record["kind"] == "measured"]
    directory = path if path.is_dir() else path.parent
    running = verdict is None and written(directory / "journal.jsonl" if path.is_dir() else path)
    return Run(directory, str(records[0].get("name", "")), records[0], records, verdict, costs, running)


def read_all(path: Path) -> list[Run]:
    """A run's directory, or one that holds several; of each playbook the latest. Raises UsageProblem."""
    if (path / "journal.jsonl").exists() or path.is_file():
        return [read_run(path)]
    found: dict[str, Run] = {}
    for journal in sorted(path.glob("*/journal.jsonl")):
        run = read_run(journal.parent)
        found[run.name] = run
    if not found:
        raise UsageProblem(str(path), "there is no run in it", "ftctl chaos list --runs")
    return list(found.values())


def past_runs(limit: int = 100) -> list[dict[str, str]]:
    """Those in the user's state directory, newest first."""
    found = []
    for journal in sorted(runs_dir().glob("*/journal.jsonl"), reverse=True)[:limit]:
        try:
            run = read_run(journal.parent)
        except UsageProblem:
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.records[0]["time"]))
        found.append({"name": run.name, "when": when, "verdict": run.word, "directory": str(journal.parent)})
    return found
