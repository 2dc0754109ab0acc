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


# What Grafana fills in when it asks (its documentation, "Global variables"), as a query would have it.
_FILLED = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def queries() -> list[str]:
    """Expressions of panels and annotations; not what is behind variables, which is not PromQL."""
    return [text for text in expressions(json.loads(DASHBOARD.read_text())) if not text.startswith("label_values(")]


def test_every_query_is_promql_with_metrics_and_labels_that_are_served(served: dict[str, set[str]]) -> None:
    """By a parser of the language, which also sees functions, operators and how vectors are matched."""
    promql = pytest.importorskip("promql_parser", reason="pip install promql-parser")

    def labels_of(expression: Any) -> set[str]:
        """Labels that its result may have. Asserts that whatever it names is there."""
        match expression:
            case promql.VectorSelector():
                assert expression.name in served, f"no metric {expression.name}"
                has = served[expression.name] | ADDED
                asked = {matcher.name for matcher in expression.matchers.matchers}
                assert asked <= has, f"{expression.name} has no label {asked - has}"
                return has
            case promql.MatrixSelector():
                return labels_of(expression.vector_selector)
            case promql.AggregateExpr():
                inside = labels_of(expression.expr)
                if expression.modifier is None:
                    return set()
                named = set(expression.modifier.labels)
                assert named <= inside, f"no label {named - inside}: {expression.prettify()}"
                by = expression.modifier.type == promql.AggModifierType.By
                return named if by else inside - named
            case promql.BinaryExpr():
                sides = [labels_of(expression.lhs), labels_of(expression.rhs)]
                matching = getattr(expression.modifier, "matching", None)
                for name in getattr(matching, "labels", ()):
                    assert all(name in side for side in sides if side), f"no label {name}: {expression.prettify()}"
                return sides[0] | sides[1]
            case promql.Call():
                return set().union(*(labels_of(argument) for argument in expression.args))
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return labels_of(expression.expr)
            case promql.NumberLiteral() | promql.StringLiteral():
                return set()
        raise AssertionError(f"a part of PromQL that this test does not know: {expression.prettify()}")

    assert len(queries()) > 30
    for query in queries():
        text = query
        for variable, value in _FILLED.items():
            text = text.replace(variable, value)
        try:
            labels_of(promql.parse(text))
        except (ValueError, AssertionError) as error:
            raise AssertionError(f"{query}: {error}") from None


def test_what_is_behind_a_variable_is_served(served: dict[str, set[str]]) -> None:
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+)(?:\{[^}]*\})?, (\w+)\)", variable["definition"])
            assert found, variable["definition"]
            assert found[2] in served[found[1]] | ADDED
            assert variable["query"]["query"] == variable["definition"]


def test_the_file_has_the_form_that_grafana_imports() -> None:
    """The dashboard's JSON model of its documentation, as far as a file can be wrong in it: what is missing or doubled
    there shows as an empty dashboard or "Datasource not found", not as an error."""
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"]
    assert board["title"]
    assert "id" not in board, "Grafana gives it"
    assert 36 <= board["schemaVersion"] <= 41, "36: sources of data by uid; 42: a form of its own (v2)"
    assert set(board["time"]) == {"from", "to"}
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert len(variables) == len(board["templating"]["list"])
    assert next(iter(variables)) == "datasource", "the others are asked of it"
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    source = {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(isinstance(number, int) and number > 0 for number in ids)
    for panel in board["panels"]:
        assert panel["title"]
        assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
        if panel["type"] == "row":
            assert panel["panels"] == [] if not panel["collapsed"] else panel["panels"]
            continue
        assert panel["type"] in ("stat", "timeseries", "state-timeline")
        assert panel["datasource"] == source
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(target["datasource"] == source and target["expr"] for target in panel["targets"])
    for one in board["annotations"]["list"] + [v for v in variables.values() if v["type"] == "query"]:
        assert one["datasource"] == source
    used = {name for text in expressions(board) for name in _VARIABLE.findall(text)}
    assert used <= set(variables) | {name[1:] for name in _FILLED}, "a variable that nobody defines"
    assert {"job", "instance"} <= used
