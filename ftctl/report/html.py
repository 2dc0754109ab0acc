"""The report that a person looks at: one file, nothing loaded from anywhere, light and dark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import resources
from statistics import median
from typing import Any

from ftctl.errors import CliError
from ftctl.report.reading import Run
from ftctl.report.timeline import svg


def render(runs: Sequence[Run]) -> str:
    """Raises CliError when the template engine is not installed."""
    try:
        import jinja2
    except ImportError:
        raise CliError("--html", "jinja2 is not installed", "pip install 'ftctl[report]'") from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    template = environment.from_string(resources.files("ftctl.report").joinpath("report.html.j2").read_text("utf-8"))
    calm = [run.calm_ms for run in runs if run.calm_ms is not None]
    return template.render(
        runs=[_view(run) for run in runs],
        passed=sum(run.passed for run in runs),
        reasons=any(run.reason for run in runs),
        calm_ms=median(calm) if calm else None,
        slower=max((run.slower for run in runs), default=1.0),
    )


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"


def _unit(objective: str) -> str:
    """Of an objective, by its name: stall_ms p95 -> ms."""
    measure = objective.split(maxsplit=1)[0]
    return next((f" {unit}" for unit in ("ms", "s") if measure.endswith(f"_{unit}")), "")


def _most(run: Run, measure: str) -> float | None:
    return max((float(cost[measure]) for cost in run.costs if cost.get(measure) is not None), default=None)


def _view(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "anchor": run.name.replace(".", "-"),
        "description": str(run.head.get("description") or ""),
        "word": run.word,
        "passed": run.passed,
        "badge": "running" if run.running else "good" if run.passed else "bad",
        "worst_ms": _most(run, "stall_ms"),
        "slowest_s": _most(run, "rejoin_s"),
        "calm_ms": run.calm_ms,
        "slower": run.slower,
        "reason": run.reason,
        "hint": str((run.verdict or {}).get("hint") or ""),
        "seconds": run.seconds,
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.records[0]["time"])),
        "seed": run.head.get("seed"),
        "environment": run.head.get("environment"),
        "repeat": run.head.get("repeat"),
        "objectives": [{"allowed": o["limit"], **o, "unit": _unit(o["objective"])} for o in run.objectives],
        "costs": run.costs,
        "timeline": svg(run),
        "story": [
            {"at": run.since(record), "kind": record["kind"], "text": _told(record), "bad": record.get("met") is False}
            for record in run.records
            if record["kind"] in ("note", "hypothesis", "incident", "action")
        ][:2000],
        "events": [
            {"injected": False, **record["event"], "time": record["event"]["time"] - run.records[0]["time"]}
            for record in run.of("event")
        ][:2000],
    }


def _told(record: dict[str, Any]) -> str:
    if record["kind"] == "note":
        return str(record.get("text", ""))
    if record["kind"] == "hypothesis":
        return f"{record.get('probe')}: {record.get('detail')}"
    if record["kind"] == "incident":
        place = "/".join(str(part) for part in (record.get("node"), record.get("nic")) if part)
        return " ".join(str(part) for part in (record.get("what"), record.get("replica"), place) if part)
    said = record.get("detail") or ", ".join(record.get("faults") or []) or ""
    return f"{record.get('what')} {record.get('target') or ''} {said}".strip()
