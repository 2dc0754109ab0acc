"""`ftctl why` for people and as a document."""

from __future__ import annotations

from rich.console import ConsoleRenderable, Group
from rich.text import Text

from ftctl.client.explain import Explanation
from ftctl.render import events
from ftctl.render.document import SCHEMA, Document
from ftctl.render.tables import BAD, GOOD, PASSING, fault_style, replica_style, table


def parts(answer: Explanation) -> list[ConsoleRenderable]:
    head = Text(f"{answer.replica} is ", style="bold")
    head.append(answer.state, style=_style(answer))
    if answer.summary:
        head.append(f": {answer.summary}", style="not bold")
    shown: list[ConsoleRenderable] = [head]
    if answer.findings:
        shown.append(table("", ("who says so", "what"), [(f.source, f.text) for f in answer.findings]))
    if answer.events:
        shown.append(Group(*map(events.line, answer.events)))
    shown.append(Text(f"next: {answer.action}" if answer.action else "next: nothing to do"))
    return shown


def _style(answer: Explanation) -> str:
    if answer.kind == "replica":
        return replica_style(answer.state)
    if answer.kind == "fault":
        return fault_style(answer.state)
    if answer.kind == "node":
        return {"healthy": GOOD, "cordoned": PASSING, "disturbed on purpose": PASSING}.get(answer.state, BAD)
    return {"UP": GOOD, "HOLD": PASSING, "PROBING": PASSING, "unused": PASSING}.get(answer.state, BAD)


def document(answer: Explanation) -> Document:
    return {
        "schema": SCHEMA,
        answer.kind: answer.replica.removeprefix("fault "),
        "state": answer.state,
        "reason": answer.summary,
        "findings": [{"source": f.source, "text": f.text} for f in answer.findings],
        "events": [events.document(event) for event in answer.events],
        "action": answer.action,
    }
