"""A summary for the page of a CI job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftctl.report.reading import Run

_MEASURES = (("detect_ms", "detected", "ms"), ("stall_ms", "stalled", "ms"), ("rejoin_s", "back after", "s"))


def render(runs: Sequence[Run]) -> str:
    passed = sum(run.passed for run in runs)
    lines = [
        f"## Chaos: {passed} of {len(runs)} playbooks passed",
        "",
        "| playbook | verdict | took | why |",
        "|---|---|---|---|",
    ]
    slow = [run for run in runs if run.slower > 1]
    if slow:
        most = max(run.slower for run in slow)
        lines[1:1] = ["", f"The machine was up to {most:g} times slower than its pace; limits of times grew with it."]
    lines += [f"| {_cell(run.name)} | {run.word} | {run.seconds:.0f} s | {_cell(run.reason)} |" for run in runs]
    for run in runs:
        if run.objectives:
            lines += [
                "",
                f"### {_cell(run.name)}",
                "",
                "| objective | measured | limit | count | met |",
                "|---|---|---|---|---|",
            ]
            for objective in run.objectives:
                measured = objective["measured"]
                shown = "-" if measured is None else f"{measured:.4g}"
                met = "yes" if objective["met"] else f"**no** {_cell(objective['reason'])}".strip()
                lines.append(
                    f"| {objective['objective']} | {shown} | {_limit(objective)} | {objective['count']} | {met} |"
                )
        if run.costs:
            lines += [
                "",
                "| incident | of | detected | stalled | back after | steps lost |",
                "|---|---|---|---|---|---|",
            ]
            for cost in run.costs[:50]:
                values = [
                    "-" if cost.get(name) is None else f"{cost[name]:.{0 if unit == 'ms' else 1}f} {unit}"
                    for name, _, unit in _MEASURES
                ]
                lost = "-" if cost.get("steps_lost") is None else f"{cost['steps_lost']:g}"
                lines.append(f"| {cost['what']} | {_cell(cost['aim'])} | {' | '.join(values)} | {lost} |")
            if len(run.costs) > 50:
                lines.append(f"| {len(run.costs) - 50} more | | | | | |")
    return "\n".join(lines) + "\n"


def _limit(objective: dict[str, Any]) -> str:
    """With what the limit has grown to on a slow machine."""
    limit, allowed = objective["limit"], objective.get("allowed", objective["limit"])
    return f"{limit:g}" if limit == allowed else f"{limit:g}, here {allowed:.4g}"


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
