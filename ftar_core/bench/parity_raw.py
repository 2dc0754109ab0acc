"""What a run of `bench parity` has left behind, read again: its losses, who contributed, and whether it may count.

A run counts only if its journals say that every batch was trained exactly once and that all who were there at the end
have the same bits: a loss of anything else would be compared with apples.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftar_core.bench.parity_run import SCHEMA, Case, Task
from ftar_core.bench.report import UsageError

LAST_SHARE = 0.1  # of the tokens: what the training loss is averaged over
MAX_BYTES = 1 << 28  # of a journal

Line = dict[str, Any]


@dataclass(frozen=True)
class Step:
    step: int
    contributors: tuple[str, ...]  # by slot
    batches: tuple[int | None, ...]  # of each of them; None: it had none
    loss: float | None
    tokens: int


@dataclass(frozen=True)
class Record:
    """One run. `problem`: why it does not count, else empty."""

    task: Task
    case: Case
    held_out_loss: float
    failures: tuple[Line, ...]
    steps: tuple[Step, ...]
    digest: str  # of parameters and optimizer state at the end
    seconds: float
    problem: str

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def contributors_mean(self) -> float:
        """Over the steps, those that had a batch."""
        return sum(sum(b is not None for b in step.batches) for step in self.steps) / len(self.steps)

    @property
    def train_loss(self) -> float:
        """Mean over the last tokens."""
        total = weight = 0.0
        for step in reversed(self.steps):
            if step.loss is not None:
                total, weight = total + step.loss * step.tokens, weight + step.tokens
            if weight >= LAST_SHARE * self.tokens:
                break
        return total / weight if weight else math.nan

    def curve(self, points: int) -> list[tuple[float, float]]:
        """(tokens, mean loss of the tokens since the point before)"""
        found: list[tuple[float, float]] = []
        done = total = weight = 0.0
        for step in self.steps:
            done += step.tokens
            if step.loss is not None:
                total, weight = total + step.loss * step.tokens, weight + step.tokens
            if weight and done >= self.tokens * (len(found) + 1) / points:
                found.append((done, total / weight))
                total = weight = 0.0
        return found


def read_run(directory: Path) -> Record:
    """UsageError: this is no run of ours, or is damaged."""
    try:
        document = json.loads((directory / "run.json").read_text())
        if document["bench"] != "parity" or document["schema"] != SCHEMA:
            raise UsageError(f"{directory}: a run of another benchmark or version", hint="run `bench parity` again")
        task, case = Task(**document["task"]), Case(**document["case"])
        loss, seconds = float(document["held_out_loss"]), float(document["seconds"])
        failures = tuple(dict(failure) for failure in document["failures"])
        journals = {path.stem: _lines(path) for path in sorted((directory / "journal").glob("*.jsonl"))}
        steps = history(journals.values())
        digest, problem = judge(journals, steps, -(-task.samples // task.batch_size))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{directory}: not a whole run of bench parity ({reason})", hint="remove it") from None
    if not math.isfinite(loss):
        problem = problem or "the held-out loss is not a number"
    return Record(task, case, loss, failures, steps, digest, seconds, problem)


def _lines(path: Path) -> list[Line]:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
    found: list[Line] = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # torn by a kill
        if isinstance(line, dict):
            found.append(line)
    return found


def history(journals: Iterable[Sequence[Line]]) -> tuple[Step, ...]:
    """Each committed step once, as a replica that contributed to it wrote it down."""
    found: dict[int, Step] = {}
    for lines in journals:
        for line in lines:
            if line["kind"] == "step" and not line["replayed"]:
                who = tuple(line["contributors"])
                batches = tuple(line["batches"].get(name) for name in who)
                found[line["step"]] = Step(line["step"], who, batches, line["loss"], line["tokens"])
    return tuple(found[step] for step in sorted(found))


def judge(journals: dict[str, list[Line]], steps: Sequence[Step], batches: int) -> tuple[str, str]:
    """(digest of the state at the end, what is wrong with the run)"""
    last = steps[-1].step if steps else 0
    if [step.step for step in steps] != list(range(1, last + 1)) or not steps:
        return "", "steps are missing in the journals"
    trained = Counter(batch for step in steps for batch in step.batches if batch is not None)
    if sorted(trained) != list(range(batches)) or set(trained.values()) != {1}:
        missed = batches - len(trained)
        return "", f"{missed} batches were never trained, {sum(n > 1 for n in trained.values())} more than once"
    ends = {
        name: f"{line['params_digest']}-{line['optimizer_digest']}"
        for name, lines in journals.items()
        for line in lines
        if line["kind"] == "end" and line["step"] == last and name in steps[-1].contributors
    }
    if not ends or len(set(ends.values())) != 1:
        return "", f"different bits at the end: {ends}" if ends else "nobody has come to the end"
    return next(iter(ends.values())), ""


def read_all(directories: Sequence[Path]) -> list[Record]:
    """All runs of these directories, which must be of one task; each once. UsageError names what is wrong."""
    found: dict[Case, tuple[Path, Record]] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        for place in sorted(
            path.parent for path in directory.glob("*/run.json") if not path.parent.name.startswith(".")
        ):
            record = read_run(place)
            if record.case in found:
                raise UsageError(f"{place}: {found[record.case][0]} is the same run", hint="give one of them")
            found[record.case] = (place, record)
    records = [record for _, record in found.values()]
    for place, record in found.values():
        if record.task != records[0].task:
            raise UsageError(f"{place}: {differing(record.task, records[0].task)}", hint="choose another directory")
    return records


def differing(one: Task, other: Task) -> str:
    """Names the first difference."""
    for name in Task.__dataclass_fields__:
        if getattr(one, name) != getattr(other, name):
            return f"its runs have {name}={getattr(one, name)}, not {getattr(other, name)}"
    return ""
