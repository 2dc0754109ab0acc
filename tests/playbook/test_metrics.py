"""Metrics in conditions: by name and labels, from the agents' own text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest

from ftctl.client.exposition import Sample, parse
from ftctl.errors import AgentUnreachable
from ftctl.playbook import expressions, metrics
from ftctl.playbook.expressions import Unknown
from ftctl.playbook.facts import problem

SAID: metrics.Read = {
    node: [
        Sample("ftctl_nic_carrier", {"nic": nic, "role": "rail"}, carrier)
        for nic, carrier in (("rail0", 1.0 if node == "node0" else 0.0), ("rail1", 1.0))
    ]
    + [Sample("ftar_effective_training_ratio", {"job": "main"}, 0.9)]
    for node in ("node0", "node1")
}


@given(st.text(max_size=30), st.text(max_size=30), st.floats(allow_nan=False))
def test_what_prometheus_client_writes_is_read_as_it_was_meant(one: str, two: str, value: float) -> None:
    registry = CollectorRegistry()
    Gauge("a_gauge", "text", ("one", "two"), registry=registry).labels(one, two).set(value)
    assert parse(generate_latest(registry).decode()) == [Sample("a_gauge", {"one": one, "two": two}, value)]


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    parse(text)
    problem(f"metric.{text}")


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("metric.ftctl_nic_carrier{node=node1,nic=rail0}", 0.0),
        ('metric.ftctl_nic_carrier{node="node0", nic="rail0"}', 1.0),
        ("metric.sum:ftctl_nic_carrier{role=rail}", 3.0),
        ("metric.min:ftctl_nic_carrier", 0.0),
        ("metric.max:ftar_effective_training_ratio", 0.9),
        ("metric.count:ftctl_nic_carrier{nic=rail9}", 0.0),
    ],
)
def test_by_name_and_labels(fact: str, value: float) -> None:
    assert problem(fact) == ""
    assert metrics.value(fact, SAID) == value
    condition = expressions.parse(f"{fact} == {value}")
    assert expressions.evaluate(condition, lambda name: metrics.value(name, SAID)).met


@pytest.mark.parametrize(
    ("fact", "part"),
    [
        ("metric.ftctl_nic_carrier{nic=rail0}", "2 series match .node=node0,nic=rail0"),
        ("metric.ftctl_nic_carrier{node=node1,nic=rail7}", "no agent has such a series"),
        ("metric.ftctl_nic_carrier{node=node7,nic=rail0}", "there is no node node7"),
        ("metric.sum:nothing", "no agent has such a series"),
    ],
)
def test_what_is_not_one_number_is_unknown_and_says_why(fact: str, part: str) -> None:
    with pytest.raises(Unknown, match=part):
        metrics.value(fact, SAID)


def test_an_agent_that_is_silent_makes_a_sum_unknown() -> None:
    said = {**SAID, "node1": AgentUnreachable("node1", "no answer")}
    with pytest.raises(Unknown, match="agent of node1: no answer"):
        metrics.value("metric.sum:ftctl_nic_carrier", said)
    assert metrics.value("metric.sum:ftctl_nic_carrier{node=node0}", said) == 2.0


@pytest.mark.parametrize(
    "fact", ["metric.", "metric.a b", "metric.mean:a", "metric.a{b}", "metric.a{b=}", "metric.a{=c}"]
)
def test_a_name_that_is_none_is_refused_when_the_playbook_is_read(fact: str) -> None:
    assert problem(fact)
