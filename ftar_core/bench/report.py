"""What every benchmark shows: rows as a table on stdout while they come, or one JSON document at the end; progress on
stderr when that is a terminal. And what every benchmark reads: sizes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ftar_core.errors import FtarError

Value = float | int | str | None
Row = dict[str, Value]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Every default that is a value stands in the help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class BenchError(FtarError):
    """A benchmark cannot go on: the thing and the reason."""


class UsageError(BenchError):
    """An argument is wrong."""


def parse_sizes(text: str, *, least: int = 1, most: int = 1 << 30, multiple: int = 1) -> list[int]:
    """ "1K,16M" -> bytes. UsageError names what is wrong."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,12})([KMG]?)", part.strip().upper())
        if match is None:
            raise UsageError(f"{part!r}: a size such as 64K, 1M or 256M is expected")
        size = int(match[1]) * _UNITS[match[2]]
        if not least <= size <= most:
            raise UsageError(f"{part!r}: from {shown(least)} to {shown(most)} is possible")
        if size % multiple:
            raise UsageError(f"{part!r}: a multiple of {multiple} bytes is expected")
        sizes.append(size)
    return sizes


def shown(size: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of them do not exceed; no value is made up in between."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    width: int
    show: Callable[[Value], str] = str
    good: Callable[[Value], bool] | None = None  # green if so, else yellow


def number(form: str = ".0f", unit: str = "") -> Callable[[Value], str]:
    return lambda value: "-" if value is None else f"{value:{form}}{unit}"


def at_least(limit: float) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, int | float) and value >= limit


def at_most(limit: float) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, int | float) and value <= limit


class Report:
    """Rows of one benchmark. `with Report(...) as report: report.step("...", 0.1); report.add(row)`."""

    def __init__(self, bench: str, columns: Sequence[Column], output: Literal["table", "json"]) -> None:
        self.bench, self.columns, self.output = bench, columns, output
        self.rows: list[Row] = []
        self._table = Console(stderr=output == "json", highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> Report:
        if self._bar is not None:
            self._task = self._bar.add_task(self.bench, total=1.0)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None and self.output == "json":
            print(json.dumps({"schema": 1, "bench": self.bench, "rows": self.rows}))

    def step(self, what: str, share: float) -> None:
        """What is going on, and how much of all is done (0..1)."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self.bench}: {what}", completed=share)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        line = Text()
        for column in self.columns:
            value = row.get(column.key)
            style = "" if column.good is None or value is None else "green" if column.good(value) else "yellow"
            line.append(f"{column.show(value):>{column.width}}", style)
        if self._bar is not None:
            self._bar.stop()
        if len(self.rows) == 1:
            self._table.print(Text("".join(f"{c.title:>{c.width}}" for c in self.columns), "bold"))
        self._table.print(line)
        if self._bar is not None:
            self._bar.start()


def ended(bench: Callable[[], int]) -> int:
    """The exit code of a benchmark; its errors as one line each."""
    try:
        return bench()
    except FtarError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"next:  {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:  # a full disk, a file that cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
