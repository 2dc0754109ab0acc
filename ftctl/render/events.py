"""Events for people: one line each, so that `ftctl events -f | grep` works."""

from __future__ import annotations

import time

from rich.text import Text

from agents.api.models import EventRecord
from ftctl.client.agent import printable
from ftctl.render.document import Document
from ftctl.render.tables import BAD, FAINT, GOOD, PASSING

_GOOD_WORDS = ("joined", "promoted", "up", "reverted", "contributing", "started", "running", "finished", "committed")
_BAD_WORDS = ("lost", "stuck", "evicted", "failed", "hung", "unreachable", "stopped", "diverged")


def line(event: EventRecord) -> Text:
    """`12:00:01.123  node1  rail.down  node1/rail0  no carrier  (injected)`, in local time."""
    stamp = time.strftime("%H:%M:%S", time.localtime(event.time)) + f".{int(event.time * 1000) % 1000:03d}"
    text = Text(f"{stamp}  ", style=FAINT)
    text.append(f"{printable(event.source):<12} ", style="not dim")
    text.append(f"{printable(event.kind):<20} ", style=f"not dim {style(event)}".strip())
    text.append(f"{printable(event.object):<14} {printable(event.reason)}", style="not dim")
    if event.injected and not event.reason.endswith("(injected)"):
        text.append("  (injected)", style=f"not dim {PASSING}")
    return text


def style(event: EventRecord) -> str:
    """Colour by the last word of the kind: replica.lost is bad unless somebody injected it."""
    word = event.kind.rpartition(".")[2]
    if word in _GOOD_WORDS:
        return GOOD
    if word in _BAD_WORDS:
        return PASSING if event.injected else BAD
    return PASSING if word in ("down", "active", "suspect", "draining") else ""


def document(event: EventRecord) -> Document:
    return {
        "seq": event.seq,
        "time": event.time,
        "source": event.source,
        "kind": event.kind,
        "object": event.object,
        "reason": event.reason,
        "injected": event.injected,
        "incident": event.incident,
        "evidence": event.evidence,
    }


def of_incident(event: EventRecord) -> Document:
    """An event as a link of the chain from a verdict to what was done about it."""
    return {
        "time": event.time,
        "incident": event.incident,
        "node": event.node or event.source,
        "kind": event.kind,
        "object": event.object,
        "verdict": event.verdict,
        "action": event.action,
        "reason": event.reason,
        "injected": event.injected,
    }
