"""/metrics in the Prometheus text format, from the same memory as /v1/node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from agents.api.models import NodeView
from agents.api.words import FaultState, Health
from agents.http.context import Agent
from agents.views import node_view

CONTENT_TYPE = CONTENT_TYPE_LATEST
HEALTH_NUMBER = {Health.HEALTHY: 0, Health.DEGRADED: 1, Health.UNHEALTHY: 2, Health.UNKNOWN: -1}
COUNTERS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "carrier_changes")


def render(agent: Agent) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Node(node_view(agent)))
    return bytes(generate_latest(registry))


class _Node(Collector):
    def __init__(self, view: NodeView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        yield from self._agent()
        yield from self._nics()
        yield from self._gpus()
        yield from self._replicas()

    def _agent(self) -> Iterator[Metric]:
        view = self._view
        yield _gauge("ftctl_agent_age_seconds", "Time since the agent started", [((), view.agent.age_s)])
        yield _gauge("ftctl_agent_resident_bytes", "Memory of the agent", [((), view.agent.rss_mb * 2**20)])
        yield _gauge("ftctl_problems", "Problems of this node", [((), len(view.problems))])
        faults = [((s.value,), sum(f.state is s for f in view.faults)) for s in FaultState]
        yield _gauge("ftctl_faults", "Faults by state; reverted ones for a minute", faults, ("state",))

    def _nics(self) -> Iterator[Metric]:
        nics = self._view.nics
        labels = ("nic", "role")
        health = [((n.name, n.role), HEALTH_NUMBER[n.state]) for n in nics]
        text = "0 healthy, 1 degraded, 2 unhealthy, -1 unknown"
        yield _gauge("ftctl_nic_health", text, health, labels)
        yield _gauge("ftctl_nic_carrier", "1 with carrier", [((n.name, n.role), n.carrier) for n in nics], labels)
        injected = [((n.name, n.role), n.injected) for n in nics]
        yield _gauge("ftctl_nic_injected", "1 while a fault of ours is on it", injected, labels)
        for name in COUNTERS:
            family = CounterMetricFamily(f"ftctl_nic_{name}", f"{name} of the device", labels=labels)
            for nic in nics:
                family.add_metric((nic.name, nic.role), getattr(nic, name))
            yield family

    def _gpus(self) -> Iterator[Metric]:
        gpus = self._view.gpus.devices
        labels = ("gpu", "uuid")
        for name, text, values in (
            ("temperature_celsius", "Temperature", [(g, g.temperature_c) for g in gpus]),
            ("utilization_percent", "Utilization", [(g, g.utilization_percent) for g in gpus]),
            ("memory_used_bytes", "Memory in use", [(g, _bytes(g.memory_used_mb)) for g in gpus]),
            ("power_watts", "Power", [(g, g.power_w) for g in gpus]),
            ("health", "0 healthy, 1 degraded, 2 unhealthy, -1 unknown", [(g, HEALTH_NUMBER[g.state]) for g in gpus]),
        ):
            samples = [((str(gpu.index), gpu.uuid), value) for gpu, value in values if value is not None]
            yield _gauge(f"ftctl_gpu_{name}", text, samples, labels)

    def _replicas(self) -> Iterator[Metric]:
        labels = ("job", "replica", "rank")
        ranks = self._view.ranks
        steps = [((r.job, r.replica, str(r.rank)), r.step) for r in ranks]
        yield _gauge("ftctl_rank_step", "The step it works on", steps, labels)
        stalls = [((r.job, r.replica, str(r.rank)), r.last_stall_ms / 1000) for r in ranks]
        yield _gauge("ftctl_rank_last_stall_seconds", "Its last stall", stalls, labels)
        tokens = [((r.job, r.replica, str(r.rank)), r.tokens_per_s) for r in ranks]
        yield _gauge("ftctl_rank_tokens_per_second", "Its speed", tokens, labels)
        restarts = CounterMetricFamily(
            "ftctl_replica_restarts", "Times a supervised process was started again", labels=("replica", "rank")
        )
        for process in self._view.processes:
            restarts.add_metric((process.replica, str(process.rank)), process.restarts)
        yield restarts


def _bytes(mb: float | None) -> float | None:
    return None if mb is None else mb * 2**20


def _gauge(
    name: str, text: str, samples: Sequence[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, float(value))
    return family
