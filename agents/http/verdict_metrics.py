"""Verdicts for /metrics: one sample for what is said of an object by one source, bounded as the incident book is."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents.api.health import HealthAnswer
from agents.api.words import Health

HEALTH_NUMBER = {Health.HEALTHY: 0, Health.DEGRADED: 1, Health.UNHEALTHY: 2, Health.UNKNOWN: -1}
_NUMBERS = "0 healthy, 1 degraded, 2 unhealthy, -1 unknown"


class Verdicts(Collector):
    def __init__(self, answer: HealthAnswer) -> None:
        self._answer = answer

    def collect(self) -> Iterator[Metric]:
        answer = self._answer
        node = GaugeMetricFamily("ftctl_node_health", f"The worst verdict of the node: {_NUMBERS}")
        node.add_metric((), HEALTH_NUMBER[answer.health])
        yield node
        labels = ("kind", "object", "code", "action", "source", "injected", "simulated")
        said = GaugeMetricFamily("ftctl_verdict", f"What is said of an object: {_NUMBERS}", labels=labels)
        # Not a counter of Prometheus: an incident that is over takes its number along.
        counts = GaugeMetricFamily("ftctl_verdict_occurrences", "How often it was said in this incident", labels=labels)
        for one in answer.verdicts:
            marks = ("yes" if one.injected else "no", "yes" if one.simulated else "no")
            values = (one.kind, one.object, one.code, one.action.value, one.source, *marks)
            said.add_metric(values, HEALTH_NUMBER[one.health])
            if one.code:
                counts.add_metric(values, one.count)
        yield said
        yield counts
        open_ones = GaugeMetricFamily("ftctl_incidents_open", "Open incidents, by kind of object", labels=("kind",))
        kinds = [one.kind for one in answer.incidents if not one.closed]
        for kind in sorted(set(kinds)):
            open_ones.add_metric((kind,), kinds.count(kind))
        yield open_ones
        looks = GaugeMetricFamily("ftctl_monitor_ok", "1 while the monitor sees what it looks at", labels=("monitor",))
        for monitor in answer.monitors:
            looks.add_metric((monitor.name,), float(monitor.ok))
        yield looks
