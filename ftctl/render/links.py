"""Links for people and as documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import ConsoleRenderable
from rich.text import Text

from agents.api.models import LinkProcessView, LinkRow
from ftctl.client import links
from ftctl.client.cluster import Snapshot
from ftctl.durations import show
from ftctl.render.document import Document
from ftctl.render.tables import BAD, FAINT, GOOD, PASSING, Cell, Items, table

Known = Mapping[str, str]
_STYLES = {"UP": GOOD, "HOLD": PASSING, "PROBING": PASSING}


def who(pid: int, kind: str, rank: str, name: str) -> str:
    """`4711 nccl rank 3`, `4712 ring r1`."""
    of = name if kind == "ring" else f"rank {rank}" if rank else ""
    return f"{pid} {kind or '?'} {of}".rstrip()


def rows(found: Sequence[tuple[str, LinkRow]], known: Known, *, wide: bool) -> ConsoleRenderable:
    heads = ["node", "process", "link", "rail", "up", "state", "since", "flaps", "resumes", "moved"]
    heads += ["detected", "retransmits", "address"] if wide else []
    return table("", [*heads, "reason"], [_row(node, row, known, wide) for node, row in found])


def _row(node: str, row: LinkRow, known: Known, wide: bool) -> tuple[Cell, ...]:
    state = row.state + (" active" if row.active else "")
    if row.hold_left_s > 0:
        state += f" {show(row.hold_left_s)} left"
    direction = "to" if row.direction == "out" else "from"
    number = f" #{row.link}" if row.link is not None else ""
    detected = "-" if row.detect_ms is None else f"{row.detect_ms:.0f} ms"
    return (
        node,
        who(row.pid, row.kind, row.rank, row.name),
        f"{direction} {links.peer_name(row, dict(known))}{number}",
        row.rail,
        f"{row.up}/{row.links}",
        Text(state, style=_STYLES.get(row.state, BAD)),
        show(row.since_s),
        str(row.flaps),
        str(row.resumes),
        size(row.bytes),
        *((detected, str(row.retransmits), row.address or "-") if wide else ()),
        row.reason or "-",
    )


def document(node: str, row: LinkRow, known: Known) -> Document:
    return {"node": node, "peer_node": links.peer_name(row, dict(known)), **row.model_dump(mode="json")}


def processes(snapshot: Snapshot) -> ConsoleRenderable | None:
    """The processes that no replica's row shows; None if there are none."""
    found = [(view.name, process) for view in snapshot.views() for process in links.of_plugin(view)]
    if not found:
        return None
    heads = ("process", "node", "job", "links", "peers", "resumes", "rails")
    return table("", heads, [_process(node, process) for node, process in found])


def _process(node: str, process: LinkProcessView) -> tuple[Cell, ...]:
    if not process.kind:
        return (str(process.pid), node, "-", "-", "-", "-", Text(process.note, style=BAD))
    rails = [
        Text.assemble(
            f"{rail.rail} ",
            (f"{rail.up}/{rail.links} {rail.state}", _STYLES.get(rail.state, BAD)),
            " active" if rail.active else "",
            f" (hold-down {show(rail.hold_left_s)})" if rail.hold_left_s > 0 else "",
        )
        for rail in process.rails
        if rail.links
    ]
    if len(rails) == 1:
        rails.append(Text("unprotected: one rail only", style=PASSING))
    if process.mode not in ("", "backup"):
        rails.append(Text(process.mode))
    if process.note:
        rails.append(Text(f"{process.note}; {show(process.silent_s)} old", style=BAD))
    return (
        who(process.pid, process.kind, process.rank, process.name),
        node,
        process.job or "-",
        str(process.links),
        str(process.peers),
        str(process.resumes),
        Items(rails) if rails else Text("no links yet", style=FAINT),
    )


def size(number: int) -> str:
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
