"""`ftctl dump` for people and as a document."""

from __future__ import annotations

from rich.console import ConsoleRenderable
from rich.text import Text

from agents.api.evidence import RankStacks
from ftctl.client.agent import printable
from ftctl.render.document import Document
from ftctl.render.tables import FAINT, PASSING, table


def parts(ranks: list[RankStacks], *, stacks: bool) -> list[ConsoleRenderable]:
    """A sentence a rank, then its Python stacks, then what the kernel says of its threads."""
    shown: list[ConsoleRenderable] = []
    for one in ranks:
        head = Text(f"{one.replica}.{one.rank}", style="bold")
        head.append(f"  pid {one.pid} on {one.node}: {printable(one.summary)}", style="not bold")
        shown.append(head)
        if not stacks:
            continue
        if one.python:
            shown.append(Text("\n".join(printable(line) for line in one.python.splitlines())))
        elif one.note:
            shown.append(Text(f"no Python stacks: {printable(one.note)}", style=PASSING))
        if one.status:
            shown.append(Text("  ".join(f"{key} {printable(value)}" for key, value in one.status.items()), style=FAINT))
        rows = [(str(t.tid), printable(t.name), t.state, t.wchan or "-", t.syscall or "-") for t in one.threads]
        if rows:
            shown.append(table("", ("thread", "name", "state", "waits in", "system call"), rows))
        if one.threads_left_out:
            shown.append(Text(f"{one.threads_left_out} more threads", style=FAINT))
        if one.kernel_stack:
            shown.append(Text(f"kernel stack of the main thread:\n{printable_lines(one.kernel_stack)}", style=FAINT))
    return shown


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def document(one: RankStacks, *, stacks: bool) -> Document:
    whole: Document = one.model_dump(mode="json")
    if not stacks:
        for key in ("python", "threads", "threads_left_out", "kernel_stack", "status"):
            whole.pop(key, None)
    return whole
