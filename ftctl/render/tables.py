"""Tables for people. Colour says one thing only: green is well, yellow is passing or done on purpose, red needs hands.

No borders (they cost a third of a narrow terminal and break copying), no emoji, and nothing that colour alone tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

GOOD = "green"
PASSING = "yellow"
BAD = "red"
FAINT = "dim"

Cell = str | Text


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> ConsoleRenderable:
    """A title line and the rows under upper-case heads; the last column folds when the terminal is narrow."""
    body = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        last = index == len(columns) - 1
        body.add_column(column.upper(), overflow="fold", no_wrap=not last, ratio=1 if last else None)
    for row in rows:
        body.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return Group(Text(title, style="bold underline"), body) if title else body


def replica_style(state: str) -> str:
    if state == "contributing":
        return GOOD
    if state in ("hung", "evicted", "blocked", "unreachable"):
        return BAD
    return PASSING


def job_style(state: str) -> str:
    if state in ("running", "finished", "uncoordinated"):
        return GOOD
    return BAD if state in ("holding", "stopped", "unknown") else PASSING


def fault_style(state: str) -> str:
    return {"stuck": BAD, "reverted": FAINT}.get(state, PASSING)


def show(console: Console, *parts: ConsoleRenderable) -> None:
    """Print the parts with an empty line between them. In a file or a pipe, lines do not end in white space."""
    with console.capture() as captured:
        for index, part in enumerate(parts):
            if index:
                console.print()
            console.print(part)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    console.file.write(text)
    console.file.flush()
