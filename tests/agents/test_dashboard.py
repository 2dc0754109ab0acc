"""The dashboard that ships asks for what /metrics serves: every metric, with labels that it has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from live_agent import live_agent
from prometheus_client.core import Metric

from agents.api.models import NodeView
from agents.http import metrics
from agents.monitors.links import Counters
from ftar_core.wire.accounting import AccountView, Category, Spent
from ftar_core.wire.messages import CheckpointView

DASHBOARD = Path(__file__).parents[2] / "packaging" / "grafana" / "ftctl.json"
# Prometheus adds it to whatever it scrapes.
ADDED = {"instance"}
_USE = re.compile(r"\b((?:ftctl|ftar)_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")


def expressions(thing: Any) -> list[str]:
    """Of panels and annotations, and the queries behind variables."""
    if isinstance(thing, dict):
        own = [value for key, value in thing.items() if key in ("expr", "definition") and isinstance(value, str)]
        return own + [found for value in thing.values() for found in expressions(value)]
    return [found for value in thing for found in expressions(value)] if isinstance(thing, list) else []


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """Name as Prometheus knows it -> labels; of a real agent, and of a job whose coordinator keeps an account."""
    spent = (Spent(Category.PRODUCTIVE, None, 2_000_000, 10),)
    account = AccountView(since=0.0, total_us=2_000_000, spent=spent, calm_us=200_000)
    with live_agent() as agent:
        agent.start()
        text = agent.get("/metrics").text
        view = NodeView.model_validate(agent.get("/v1/node").json())
    kept = CheckpointView(step=400, time=1.0, bytes=1, seconds=1.0, failed_step=300, failed_time=1.0, failures=1)
    families: list[Metric] = [
        *metrics._Node(view, Counters()).collect(),
        *metrics.JobTime("llm", account).collect(),
        *metrics.JobCheckpoints("llm", kept, 2.0).collect(),
    ]
    names = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    for name in names:
        assert name.startswith("ftar_") or f"# TYPE {name} " in text, f"{name} is not in /metrics"
    return {name: set(family._labelnames) for name, family in names.items()}  # type: ignore[attr-defined]


def test_every_metric_of_the_dashboard_is_served_with_its_labels(served: dict[str, set[str]]) -> None:
    used: set[str] = set()
    for expression in expressions(json.loads(DASHBOARD.read_text())):
        labels: set[str] = set()
        for name, matchers in _USE.findall(expression):
            assert name in served, f"{name}: not in /metrics: {expression}"
            used.add(name)
            labels |= served[name]
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert asked <= served[name] | ADDED, f"{name} has no label {asked - served[name]}: {expression}"
        for group in _BY.findall(expression):
            asked = {part.strip() for part in group.split(",")}
            assert asked <= labels | ADDED, f"no label {asked - labels}: {expression}"
    assert len(used) > 30


def test_legends_name_labels_that_are_there(served: dict[str, set[str]]) -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {part.strip() for group in _BY.findall(target["expr"]) for part in group.split(",")}
            (name,) = {found for found, _matchers in _USE.findall(target["expr"])}
            assert shown <= (grouped or served[name] | ADDED), f"{panel['title']}: {target}"


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_names_and_units_are_those_of_prometheus(served: dict[str, set[str]]) -> None:
    """Base units; a counter ends in _total, nothing else does; no label has a name that Prometheus gives itself."""
    for name, labels in served.items():
        assert re.fullmatch(r"(ftctl|ftar)(_[a-z0-9]+)+", name)
        assert not re.search(r"_(ms|us|mb|kb|minutes)(_|$)", name), name
        assert not labels & {"instance", "le", "quantile"}, name
