"""Facts about metrics: `metric.ftctl_nic_carrier{node=node1,nic=rail0}`, from the agents' /metrics.

`node` is the agent that says it; every other label is the metric's own. One series must match, so that a condition
means one thing; where several may, `metric.sum:NAME{...}` says how they become one number (sum, min, max, count).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ftctl.client.agent import AgentClient
from ftctl.client.cluster import Agents
from ftctl.client.exposition import Sample, parse
from ftctl.errors import CliError
from ftctl.playbook.expressions import Expression, Unknown

PREFIX = "metric."
NODE = "node"
SHOWN = 4  # series that an ambiguous name is answered with
_FACT = re.compile(r"metric\.(?:(\w+):)?([A-Za-z_][A-Za-z0-9_]*)(?:\{([^{}]*)\})?\Z")
_LABEL = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?:\"([^\"]*)\"|([^\s,\"{}]+))\s*(?:,|\Z)")
_TOGETHER: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "count": lambda values: float(len(values)),
}

Read = Mapping[str, list[Sample] | CliError]  # node -> what its agent said


@dataclass(frozen=True)
class Wanted:
    name: str
    labels: Mapping[str, str]
    together: str = ""

    @property
    def node(self) -> str:
        return self.labels.get(NODE, "")


def wanted(fact: str) -> Wanted:
    """Raises ValueError: the text is no metric's name and labels."""
    match = _FACT.match(fact)
    if match is None:
        raise ValueError(f"{fact}: metric.NAME or metric.NAME{{label=value,...}} is expected")
    together, name, inside = match.groups()
    if together and together not in _TOGETHER:
        raise ValueError(f"{fact}: there is no {together} of series (there are: {', '.join(_TOGETHER)})")
    labels: dict[str, str] = {}
    at, text = 0, inside or ""
    while at < len(text):
        label = _LABEL.match(text, at)
        if label is None:
            raise ValueError(f"{fact}: label=value is expected at `{text[at:][:20]}`")
        labels[label[1]] = label[2] if label[2] is not None else label[3]
        at = label.end()
    return Wanted(name, labels, together or "")


def problem(fact: str) -> str:
    try:
        wanted(fact)
    except ValueError as error:
        return str(error)
    return ""


async def read(agents: Agents, condition: Expression) -> Read:
    """The metrics of the agents that the condition is about; asks nobody where it is about none."""
    asked = [wanted(c.fact) for c in condition.comparisons if c.fact.startswith(PREFIX)]
    if not asked:
        return {}
    known = [node.name for node in agents.inventory.nodes]
    every = any(not one.node for one in asked)
    nodes = known if every else [name for name in known if name in {one.node for one in asked}]
    answers = await agents.each(AgentClient.metrics, nodes)
    return {name: answer if isinstance(answer, CliError) else parse(answer) for name, answer in answers.items()}


def value(fact: str, said: Read) -> float:
    """Raises Unknown."""
    one = wanted(fact)
    own = {label: text for label, text in one.labels.items() if label != NODE}
    if one.node and one.node not in said:
        raise Unknown(f"{fact}: there is no node {one.node}")
    found: list[tuple[str, Sample]] = []
    silent: list[CliError] = []
    for node, samples in said.items():
        if one.node and node != one.node:
            continue
        if isinstance(samples, CliError):
            silent.append(samples)
            continue
        found += [
            (node, sample)
            for sample in samples
            if sample.name == one.name and all(sample.labels.get(label) == text for label, text in own.items())
        ]
    if silent:  # what it would have said is not known, and a sum without it is another number
        raise Unknown(f"{fact}: {silent[0]}")
    if one.together == "count":
        return float(len(found))
    if not found:
        raise Unknown(f"{fact}: no agent has such a series")
    if one.together:
        return _TOGETHER[one.together]([sample.value for _node, sample in found])
    if len(found) > 1:
        some = "; ".join(_shown(node, sample) for node, sample in found[:SHOWN])
        raise Unknown(f"{fact}: {len(found)} series match ({some}): name more labels, or metric.sum:{one.name}")
    return found[0][1].value


def _shown(node: str, sample: Sample) -> str:
    return ",".join(f"{label}={text}" for label, text in {NODE: node, **sample.labels}.items())
