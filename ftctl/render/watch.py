"""`ftctl watch`: one screen, as high and as wide as the terminal is now.

What needs hands comes first in every list, so that a screen of 40 lines is of use for 1,000 nodes: what finds no
room is counted. Colour says what it says everywhere (tables.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.segment import Segment
from rich.text import Text

from agents.api.models import NodeView
from ftctl.client.cluster import NodeAnswer, Snapshot
from ftctl.client.problems import find, is_bad, recommend
from ftctl.client.watching import Curve, Picture
from ftctl.durations import show
from ftctl.render import document, events
from ftctl.render.status import job_line, milliseconds, rail
from ftctl.render.tables import BAD, FAINT, GOOD, PASSING, Cell, Harmless, Items, fault_style, replica_style, table

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*%#"
LATE_S = 5.0  # a snapshot older than this is said to be old
_LEAST_EVENTS = 4
_COLUMNS = {
    "faults": ("fault", "kind", "target", "state", "left", "owner", "reason"),
    "replicas": ("replica", "state", "step", "epoch", "nodes", "loss", "step time", "reason"),
    "nodes": ("node", "agent", "rails"),
}


def sparkline(values: Sequence[float | None], *, plain: bool = False) -> str:
    """One character a value, the tallest for the largest; a blank where nothing is known. From zero, so that a curve
    that hardly moves looks flat."""
    bars = PLAIN_BARS if plain else BARS
    top = max((value for value in values if value is not None), default=0.0)
    if top <= 0:
        return "".join(" " if value is None else bars[0] for value in values)
    return "".join(
        " " if value is None else bars[min(len(bars) - 1, int(max(0.0, value) / top * (len(bars) - 1) + 0.5))]
        for value in values
    )


class Screen:
    """All of it, cut to the size of the console at the moment of drawing."""

    def __init__(self, picture: Picture, now: float) -> None:
        self._picture = picture
        self._now = now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.size.height
        lines = _lines(self._picture, self._now, console, width, max(1, height))
        one_line = options.update(no_wrap=True, width=width, height=None, overflow="crop")
        for index, line in enumerate(lines):
            line.truncate(width, overflow="ellipsis")
            line.end = ""
            if index:
                yield Segment.line()
            yield from Harmless(line).__rich_console__(console, one_line)


def _lines(picture: Picture, now: float, console: Console, width: int, height: int) -> list[Text]:
    foot = Text("q or Ctrl-C ends", style=FAINT)
    snapshot = picture.snapshot
    if snapshot is None:
        return [Text(picture.trouble or "asking the agents ..."), foot][:height]
    head = [*_heading(picture, snapshot, now, width), *_curves(picture, console, width)]
    advice = recommend(find(snapshot))
    if advice is not None:
        head.append(Text.assemble(("next: ", "bold"), f"{advice.action}   (because of {advice.object})"))
    room = height - len(head) - 1
    replicas, nodes, faults = _replicas(picture, snapshot), _nodes(picture, snapshot, now), _faults(snapshot)
    body: list[Text] = []
    # The three tables share what the events leave; each gets what it needs if the others need less.
    shares = _shares([len(faults), len(replicas), len(nodes)], room - _LEAST_EVENTS)
    for what, rows, share in zip(_COLUMNS, (faults, replicas, nodes), shares, strict=True):
        body += _table(console, width, what, rows, share)
    left = room - len(body)
    if left > 1:
        body.append(Text(""))
        latest = list(picture.events)[-(left - 1) :]
        body += [events.line(event) for event in latest] or [Text("no events yet", style=FAINT)]
    return [*(head + body)[: max(0, height - 1)], foot]


def _shares(wanted: list[int], room: int) -> list[int]:
    """Lines for each table (an empty line and the heads included), the smallest wishes first."""
    need = [rows + 2 if rows else 0 for rows in wanted]
    given = [0] * len(need)
    order = sorted(range(len(need)), key=lambda at: need[at])
    for place, at in enumerate(order):
        given[at] = min(need[at], max(0, room // (len(order) - place)))
        room -= given[at]
    return given


def _table(console: Console, width: int, what: str, rows: list[tuple[Cell, ...]], share: int) -> list[Text]:
    """At most `share` lines. A row that does not fit whole is left out with those behind it, and they are counted."""
    if not rows or share < 3:
        return [Text(f"{len(rows)} {what}", style=FAINT)] if rows and share else []
    for count in range(min(len(rows), share - 2), 0, -1):
        lines = [Text(""), *_drawn(console, width, table("", _COLUMNS[what], rows[:count]))]
        if count < len(rows):
            lines.append(Text(f"and {len(rows) - count} more {what}", style=FAINT))
        if len(lines) <= share:
            return lines
    return [Text(f"{len(rows)} {what}", style=FAINT)]


def _drawn(console: Console, width: int, part: ConsoleRenderable) -> list[Text]:
    """As lines, with their colours."""
    options = console.options.update(width=width, height=None)
    return [
        Text.assemble(*((segment.text, segment.style or "") for segment in line))
        for line in console.render_lines(part, options, pad=False)
    ]


def _heading(picture: Picture, snapshot: Snapshot, now: float, width: int) -> list[Text]:
    stamp = time.strftime("%H:%M:%S", time.localtime(now))
    age = now - snapshot.time
    clock = Text(stamp, style=FAINT)
    if picture.trouble or age > LATE_S:
        late = f"as of {show(max(0.0, age))} ago" + (f": {picture.trouble}" if picture.trouble else "")
        clock = Text(late, style=BAD)
    lost = picture.job_lost_since
    lines: list[Text] = []
    if lost is not None and picture.job is not None and not snapshot.finished():
        last = picture.job
        line = Text(f"job {snapshot.job_name}  ", style="bold")
        line.append(
            f"coordinator unreachable since {_clock(lost)} ({show(max(0.0, now - lost))})", style=f"not bold {BAD}"
        )
        line.append(f"  last known: step {last.step}  epoch {last.term}.{last.epoch}", style="not bold")
        lines = [line, Text(str(snapshot.job_error or ""), style=FAINT)]
    else:
        drawn = job_line(snapshot)
        lines = list(drawn.split("\n")) if isinstance(drawn, Text) else []
    gap = width - cell_len(lines[0].plain) - cell_len(clock.plain)
    if gap >= 2:
        lines[0] = Text.assemble(lines[0], " " * gap, clock)
    elif clock.plain != stamp:
        lines.append(clock)
    return lines


def _curves(picture: Picture, console: Console, width: int) -> list[Text]:
    plain = not console.encoding.lower().startswith("utf")
    found = []
    for name, curve, unit in (
        ("step time ", picture.step_ms, "ms"),
        ("tokens/s  ", picture.tokens_per_s, ""),
    ):
        last = curve.last()
        if last is None:
            continue
        said = f" {last:,.0f} {unit}".rstrip() + f", at most {_top(curve):,.0f}"
        room = max(0, width - len(name) - len(said) - 1)
        found.append(Text.assemble(name, (sparkline(curve.newest(room), plain=plain), GOOD), said))
    return found


def _top(curve: Curve) -> float:
    return max((value for value in curve.points if value is not None), default=0.0)


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _replicas(picture: Picture, snapshot: Snapshot) -> list[tuple[Cell, ...]]:
    """Those that do not contribute first. Without a coordinator its last word, and what the ranks say now."""
    job = snapshot.job
    rows: list[tuple[Cell, ...]] = []
    epochs = {r.replica: f"{r.term}.{r.epoch}" for view in snapshot.views() for r in view.ranks}
    for r in sorted(
        document.replicas(snapshot), key=lambda r: (r["state"] in ("contributing", "spare"), str(r["name"]))
    ):
        state, loss, step_ms = str(r["state"]), r["loss"], r["step_ms"]
        nodes = r["nodes"]
        rows.append(
            (
                str(r["name"]),
                Text(state, style=replica_style(state) if job is not None else FAINT),
                str(r["step"]),
                epochs.get(str(r["name"]), "-"),
                " ".join(map(str, nodes)) if isinstance(nodes, list) else "",
                f"{loss:.4f}" if isinstance(loss, float) else "-",
                milliseconds(step_ms if isinstance(step_ms, float) else None),
                str(r["reason"]) + ("; a straggler: the others wait for it" if r["straggler"] else ""),
            )
        )
    return rows


def _nodes(picture: Picture, snapshot: Snapshot, now: float) -> list[tuple[Cell, ...]]:
    return [
        (
            answer.name,
            Text(
                f"unreachable since {_clock(since)} ({show(max(0.0, now - since))})"
                if (since := picture.lost_since.get(answer.name)) is not None
                else "unreachable",
                style=BAD,
            ),
            Text(answer.error.reason if answer.error else "no answer", style=BAD),
        )
        if answer.view is None
        else _node(answer.view)
        for answer in sorted(snapshot.nodes, key=_well)
    ]


def _well(answer: NodeAnswer) -> tuple[int, str]:
    view = answer.view
    if view is None:
        return 0, answer.name
    bad = view.cordon is not None or bool(view.problems) or any(n.role == "rail" and is_bad(n) for n in view.nics)
    return (1 if bad else 2), answer.name


def _node(view: NodeView) -> tuple[Cell, ...]:
    agent = Text("cordoned", style=PASSING) if view.cordon is not None else Text("up", style=GOOD)
    rails = [rail(view, nic, wide=False) for nic in view.nics if nic.role == "rail"]
    return (view.name, agent, Items(rails) if rails else Text("none declared", style=FAINT))


def _faults(snapshot: Snapshot) -> list[tuple[Cell, ...]]:
    """Stuck ones first."""
    open_ones = [f for f in snapshot.faults() if not f.state.over]
    return [
        (
            f.id,
            f.kind,
            f.target,
            Text(f.state.value, style=fault_style(f.state.value)),
            show(max(0.0, f.ttl_left_s)),
            f.owner,
            "; ".join(part for part in (f.reason, f.detail) if part) or "-",
        )
        for f in sorted(open_ones, key=lambda f: (f.state.value != "stuck", f.created))
    ]
