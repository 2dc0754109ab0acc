"""`ftctl health` for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import ConsoleRenderable, Group
from rich.text import Text

from agents.api.health import HealthAnswer, Verdict
from agents.api.words import Action, Health
from ftctl.client.agent import printable
from ftctl.durations import show as ago
from ftctl.render.tables import BAD, FAINT, GOOD, PASSING, table

CLOSED_SHOWN = 10


def parts(answers: Mapping[str, HealthAnswer], *, now: float, explain: bool) -> list[ConsoleRenderable]:
    """What is wrong or recorded, of all nodes; what is well is counted only."""
    said = [verdict for answer in answers.values() for verdict in answer.verdicts if verdict.code]
    well = sum(not v.code and v.health is Health.HEALTHY for answer in answers.values() for v in answer.verdicts)
    rows = [_row(verdict, now) for verdict in said]
    shown: list[ConsoleRenderable] = []
    if rows:
        shown.append(table("", ("node", "object", "health", "for", "times", "suggested", "incident", "reason"), rows))
    where = f"{len(answers)} node{'' if len(answers) == 1 else 's'}"
    shown.append(Text(f"well on {where}: {well}" if well else "no part is known to be well"))
    for name, answer in answers.items():
        blind = [m for m in answer.monitors if not m.ok and m.note]
        shown += [Text(f"{name}: not seen: {m.name}: {printable(m.note)}", style=FAINT) for m in blind]
    if explain:
        shown += [_explained(verdict) for verdict in said]
        shown += _closed(answers, now)
        looks = [
            (n, m.name, "looks" if m.ok else "blind", printable(m.note)) for n, a in answers.items() for m in a.monitors
        ]
        shown.append(table("what looks", ("node", "monitor", "state", "note"), looks))
    return shown


def _row(verdict: Verdict, now: float) -> tuple[str | Text, ...]:
    reason = printable(verdict.reason) + marks(verdict)
    return (
        printable(verdict.node),
        printable(verdict.object),
        Text(verdict.health.value, style=style(verdict)),
        ago(max(0.0, now - verdict.since)),
        str(verdict.count),
        "" if verdict.action is Action.NONE else verdict.action.value,
        verdict.incident,
        reason,
    )


def marks(verdict: Verdict) -> str:
    """Who says so, if it is another monitor; what is not hardware, and what was done on purpose."""
    words = [f"says {printable(verdict.source)}"] if verdict.source != "ft-agent" else []
    words += ["simulated"] if verdict.simulated else []
    words += [f"injected{f' by {verdict.fault}' if verdict.fault else ''}"] if verdict.injected else []
    return f" ({', '.join(words)})" if words else ""


def style(verdict: Verdict) -> str:
    if verdict.health is Health.HEALTHY:
        return GOOD
    if verdict.health is Health.UNHEALTHY and not verdict.injected:
        return BAD
    return PASSING


def _explained(verdict: Verdict) -> ConsoleRenderable:
    title = f"{printable(verdict.node)}/{printable(verdict.object)}: {verdict.code}"
    lines = [Text(title, style="bold"), Text(f"  why: {printable(verdict.reason)}{marks(verdict)}")]
    if verdict.uuid:
        lines.append(Text(f"  is: {printable(verdict.uuid)}"))
    lines += [Text(f"  evidence: {printable(line)}") for line in verdict.evidence]
    if verdict.times > 1:
        lines.append(Text(f"  came back: {verdict.times} times within a day"))
    if verdict.hint:
        lines.append(Text(f"  hint: {printable(verdict.hint)}"))
    if verdict.incident:
        lines.append(Text(f"  next: ftctl events --incident {verdict.incident}"))
    return Group(*lines)


def _closed(answers: Mapping[str, HealthAnswer], now: float) -> list[ConsoleRenderable]:
    over = [one for answer in answers.values() for one in answer.incidents if one.closed]
    over.sort(key=lambda one: -one.closed)
    rows = [
        (ago(max(0.0, now - one.closed)), one.node, one.object, one.id, ", ".join(one.codes), printable(one.why_closed))
        for one in over[:CLOSED_SHOWN]
    ]
    heads = ("ago", "node", "object", "incident", "codes", "over because")
    return [table("incidents that are over", heads, rows)] if rows else []
