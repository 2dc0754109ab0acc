"""What nobody may overlook: a fault that could not be taken back, and the commands with which a person does it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from agents.api.models import FaultState, FaultView
from ftctl.client.cluster import Snapshot
from ftctl.render import document
from ftctl.render.tables import BAD


def stuck(snapshot: Snapshot) -> list[FaultView]:
    return [fault for fault in snapshot.faults() if fault.state is FaultState.STUCK]


def parts(snapshot: Snapshot) -> Iterator[Text]:
    """Above everything else, one a fault; each command on a line of its own, to be copied."""
    for fault in stuck(snapshot):
        text = Text()
        text.append(f"FAULT {fault.id} COULD NOT BE TAKEN BACK", style=f"bold {BAD}")
        text.append(f": {fault.kind} on {fault.target}: {fault.detail or 'no reason given'}\n")
        commands = [line for line in fault.undo if not line.startswith("#")]
        notes = [line for line in fault.undo if line.startswith("#")]
        if commands:
            text.append(f"by hand, as root on {fault.node}:\n")
        text.append("".join(f"    {line}\n" for line in (*commands, *notes)))
        text.append(f"then: ftctl revert {fault.id}")
        yield text
    for view in snapshot.views():
        for problem in view.problems:
            if problem.in_force:
                text = Text()
                text.append(f"A FAULT MAY BE IN FORCE ON {view.name}", style=f"bold {BAD}")
                text.append(f": {problem.reason}\nby hand there: {problem.action}")
                yield text


def documents(snapshot: Snapshot) -> list[document.Document]:
    return [document.fault(fault) for fault in stuck(snapshot)]
