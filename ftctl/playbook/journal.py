"""What a run did and saw, as JSON lines. Each line is on disk (fsync) before the run goes on: a report can be made of a
run whose controller died, and nothing that was injected is missing from it.

Records have `kind`, `time` (Unix seconds) and `mono` (the controller's monotonic clock); the rest depends on the kind:
run, hypothesis, action, incident, sample, event, measured, verdict, note, end. Readers ignore what they do not know.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ftctl.errors import CliError, UsageProblem
from ftctl.playbook.records import problem

SCHEMA = 1
Record = dict[str, Any]
MAX_LINE = 1024 * 1024


class Journal:
    """Appends records. A disk that is full stops the experiment (JournalError), not its clean-up."""

    def __init__(self, path: Path, now: Callable[[], tuple[float, float]]) -> None:
        """`now` gives (Unix seconds, monotonic seconds). Raises CliError when the file cannot be made."""
        self.path = path
        self.records: list[Record] = []
        self._now = now
        self._file: TextIO | None
        try:
            self._file = path.open("x", encoding="utf-8")
            with suppress(OSError):  # not every file system has locks; it only tells readers that somebody writes
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CliError(f"journal {path}", error.strerror or str(error), "--out DIR puts it elsewhere") from None

    def write(self, kind: str, **more: Any) -> Record:
        """Raises JournalError when the line is not safely on disk; the record is in `records` all the same."""
        time, mono = self._now()
        record: Record = {"kind": kind, "time": round(time, 6), "mono": round(mono, 6), **more}
        self.records.append(record)
        if self._file is None:
            return record
        try:
            self._file.write(json.dumps(record, default=str) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                pass
            raise JournalError(self.path, error) from None
        return record

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                pass


class JournalError(CliError):
    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"journal {path}",
            f"{error.strerror or error}: the run is ended and cleaned up",
            "df -h; --out DIR puts it elsewhere",
        )


def written(path: Path) -> bool:
    """True if a run still writes this journal."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read(path: Path) -> list[Record]:
    """The records of a run; its directory or its journal.jsonl. Raises UsageProblem."""
    file = path / "journal.jsonl" if path.is_dir() else path
    try:
        if file.exists() and not file.is_file():
            raise UsageProblem(str(file), "no journal of a run", "ftctl chaos list --runs")
        with file.open("rb") as stream:
            lines = stream.readlines(256 * MAX_LINE)
    except OSError as error:
        raise UsageProblem(str(file), error.strerror or str(error), "ftctl chaos list --runs") from None
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)  # a loss may be no number
        except (ValueError, RecursionError):
            if number == len(lines):
                break  # the controller was killed while it wrote this
            raise UsageProblem(f"{file}:{number}", "not a line of a journal") from None
        if wrong := problem(record):
            raise UsageProblem(f"{file}:{number}", f"not a line of a journal: {wrong}")
        records.append(record)
    if not records or records[0]["kind"] != "run":
        raise UsageProblem(str(file), "no journal of a run", "ftctl chaos list --runs")
    if records[0].get("schema") != SCHEMA:
        raise UsageProblem(str(file), f"a journal of schema {records[0].get('schema')}; this ftctl reads {SCHEMA}")
    return records
