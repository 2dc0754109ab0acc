"""Tables for people. Colour says one thing only: green is well, yellow is passing or done on purpose, red needs hands.

No borders (they cost a third of a narrow terminal and break copying), no emoji, and nothing that colour alone tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.control import strip_control_codes
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ftctl.plain import harmless

GOOD = "green"
PASSING = "yellow"
BAD = "red"
FAINT = "dim"


class Items:
    """Things side by side, such as the rails of a node: a line ends between two of them, and inside one only where it
    is wider than the terminal by itself."""

    def __init__(self, items: Iterable[Text]) -> None:
        self.items = list(items)

    def beside(self, width: int | None = None) -> Text:
        """In lines of at most `width` columns; None: in one line."""
        lines: list[Text] = []
        for item in self.items:
            if lines and (width is None or _width(lines[-1]) + _GAP + _width(item) <= width):
                lines[-1] = Text.assemble(lines[-1], " " * _GAP, item)
            else:
                lines.append(item)
        return Text("\n").join(lines)


Cell = str | Text | Items

_GAP = 2
_UNDER = 4  # how far the last column stands in under its row
_LEAST_LAST = 24  # columns of the last column, below which its text would be a ribbon


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> ConsoleRenderable:
    """A title line and the rows under upper-case heads; the last column folds when the terminal is narrow."""
    body = _Fitting([column.upper() for column in columns], rows)
    return Group(Text(title, style="bold underline"), body) if title else body


def _text(cell: Cell, width: int | None = None) -> Text:
    return cell.beside(width) if isinstance(cell, Items) else cell if isinstance(cell, Text) else Text(cell)


class _Fitting:
    """A table whose cells are never cut: where the others leave the last column no room, it goes under its row."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._heads = heads
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = [Text(head, style="bold") for head in self._heads]
        lines = [heads, *([_text(cell) for cell in row] for row in self._rows)]
        widths = [max(_width(line[index]) for line in lines) for index in range(len(self._heads))]
        taken = sum(widths[:-1]) + _GAP * (len(widths) - 1)
        under = taken + min(widths[-1], _LEAST_LAST) > options.max_width
        room = None if options.no_wrap else options.max_width - (_UNDER if under else taken)
        lines = [heads, *([*map(_text, row[:-1]), _text(row[-1], room)] for row in self._rows)]
        if under:
            for *cells, last in lines:
                yield Text(" ").join(_padded(cell, width) for cell, width in zip(cells, widths, strict=False))
                yield Padding(last, (0, 0, 0, _UNDER))
            return
        if taken + widths[-1] <= options.max_width and all("\n" not in cell.plain for line in lines for cell in line):
            yield from self._straight(console, lines, widths)
            return
        body = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for index, head in enumerate(self._heads):
            last_one = index == len(self._heads) - 1
            body.add_column(head, overflow="fold", no_wrap=not last_one, ratio=1 if last_one else None)
        for line in lines[1:]:
            body.add_row(*line)
        yield body

    @staticmethod
    def _straight(console: Console, lines: list[list[Text]], widths: list[int]) -> RenderResult:
        """Where nothing folds: what rich's table would print in ten times the time, a second for 1,000 rows."""
        for line in lines:
            for index, cell in enumerate(line):
                if cell.spans:
                    yield from Text(cell.plain, cell.style, spans=cell.spans, end="").render(console)
                else:
                    style = console.get_style(cell.style) if cell.style else None
                    yield Segment(strip_control_codes(cell.plain), style)
                if index < len(line) - 1:
                    yield Segment(" " * (widths[index] - _width(cell) + _GAP))
            yield Segment.line()


def _padded(text: Text, width: int) -> Text:
    padded = text.copy()
    padded.append(" " * (width - _width(text)))
    return padded


def _width(text: Text) -> int:
    return max((cell_len(line) for line in text.plain.splitlines()), default=0)


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


class Harmless:
    """Reasons and names come from other users and from the network: what would rewrite the terminal is blanked."""

    def __init__(self, part: ConsoleRenderable) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._part, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def show(console: Console, *parts: ConsoleRenderable) -> None:
    """Print the parts with an empty line between them. In a file or a pipe, lines do not end in white space."""
    with console.capture() as captured:
        for index, part in enumerate(parts):
            if index:
                console.print()
            console.print(Harmless(part))
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    console.file.write(text)
    console.file.flush()
