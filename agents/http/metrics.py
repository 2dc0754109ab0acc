"""/metrics in the Prometheus text format, from the same memory as /v1/node; where the job's time went, from the
coordinator (the same on every agent of a job, so take one of them: `max by (job, category, cause)`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from agents.api.models import NodeView
from agents.api.words import FaultState
from agents.http.context import Agent
from agents.http.verdict_metrics import HEALTH_NUMBER, Verdicts
from agents.monitors.links import COUNTED_RAILS, OTHER, Counters
from agents.views import node_view
from ftar_core.wire.accounting import AccountView
from ftar_core.wire.linkstatus import STATES
from ftar_core.wire.messages import CheckpointView, OpReply

CONTENT_TYPE = CONTENT_TYPE_LATEST
COUNTERS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "carrier_changes")


def render(agent: Agent, saved: OpReply | None = None) -> bytes:
    """`saved`: what the coordinator has last saved of its job, if it has said so."""
    registry = CollectorRegistry()
    registry.register(_Node(node_view(agent), agent.links.counters()))
    registry.register(Verdicts(agent.parts.health.answer()))
    if saved is not None and agent.settings.coordinator is not None:
        job = agent.settings.coordinator.job
        if saved.accounting is not None:
            registry.register(JobTime(job, saved.accounting))
        if saved.checkpoint is not None:
            registry.register(JobCheckpoints(job, saved.checkpoint, time.time()))
    return bytes(generate_latest(registry))


class _Node(Collector):
    def __init__(self, view: NodeView, counters: Counters) -> None:
        self._view = view
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        yield from self._agent()
        yield from self._nics()
        yield from self._gpus()
        yield from self._replicas()
        yield from self._links()

    def _agent(self) -> Iterator[Metric]:
        view = self._view
        yield _gauge("ftctl_agent_age_seconds", "Time since the agent started", [((), view.agent.age_s)])
        yield _gauge("ftctl_agent_resident_bytes", "Memory of the agent", [((), view.agent.rss_mb * 2**20)])
        yield _gauge("ftctl_problems", "Problems of this node", [((), len(view.problems))])
        yield _gauge("ftctl_node_cordoned", "1 while the node is set apart", [((), view.cordon is not None)])
        yield _gauge("ftctl_faults_halted", "1 while no fault is injected here", [((), view.halt is not None)])
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
        labels = ("gpu", "uuid", "simulated")
        for name, text, values in (
            ("temperature_celsius", "Temperature", [(g, g.temperature_c) for g in gpus]),
            ("utilization_percent", "Utilization", [(g, g.utilization_percent) for g in gpus]),
            ("memory_used_bytes", "Memory in use", [(g, _bytes(g.memory_used_mb)) for g in gpus]),
            ("power_watts", "Power", [(g, g.power_w) for g in gpus]),
            ("health", "0 healthy, 1 degraded, 2 unhealthy, -1 unknown", [(g, HEALTH_NUMBER[g.state]) for g in gpus]),
        ):
            samples = [
                ((str(gpu.index), gpu.uuid, "yes" if gpu.simulated else "no"), value)
                for gpu, value in values
                if value is not None
            ]
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

    def _links(self) -> Iterator[Metric]:
        """By kind of process and rail, never by connection; rails beyond COUNTED_RAILS are one."""
        processes = self._view.link_processes
        kinds = sorted({p.kind for p in processes if p.kind})
        counts = [((kind,), sum(p.kind == kind for p in processes)) for kind in kinds]
        yield _gauge("ftctl_link_processes", "Processes with links", counts, ("kind",))
        silent = max((p.silent_s for p in processes), default=0.0)
        yield _gauge("ftctl_link_silence_seconds", "Since the last answer of the most silent process", [((), silent)])
        states: dict[tuple[str, str, str], int] = {}
        flaps: dict[tuple[str, str], int] = {}
        hold: dict[tuple[str, str], float] = {}
        for process in processes:
            for rail in process.rails:
                key = (process.kind, rail.rail)
                if key not in flaps and len(flaps) >= COUNTED_RAILS:
                    key = (process.kind, OTHER)
                flaps[key] = max(flaps.get(key, 0), rail.flaps)
                hold[key] = max(hold.get(key, 0.0), rail.hold_left_s)
                for state in STATES:
                    where = (key[0], key[1], state)
                    states[where] = states.get(where, 0) + rail.states.get(state, 0)
        labels = ("kind", "rail")
        yield _gauge(
            "ftctl_links", "Connections by the state of a rail", list(states.items()), ("kind", "rail", "state")
        )
        yield _gauge("ftctl_link_flaps", "Most losses of one connection not yet forgotten", list(flaps.items()), labels)
        yield _gauge("ftctl_link_hold_down_seconds", "Longest hold-down left", list(hold.items()), labels)
        for name, text, values in (
            ("bytes", "Bytes that connections sent or received, with their headers", self._counters.bytes),
            ("losses", "Times a connection lost a rail", self._counters.losses),
        ):
            family = CounterMetricFamily(f"ftctl_link_{name}", text, labels=labels)
            for counted, value in sorted(values.items()):
                family.add_metric(counted, value)
            yield family
        family = CounterMetricFamily("ftctl_link_resumes", "Times data went on over another rail", labels=("kind",))
        for kind, value in sorted(self._counters.resumes.items()):
            family.add_metric((kind,), value)
        yield family


class JobTime(Collector):
    """What a job's time was spent on. All categories and causes together are all of it."""

    def __init__(self, job: str, account: AccountView) -> None:
        self._job = job
        self._account = account

    def collect(self) -> Iterator[Metric]:
        job, account = self._job, self._account
        if account.effective is not None:
            text = "Productive time by all time since the job's start"
            yield _gauge("ftar_effective_training_ratio", text, [((job,), account.effective)], ("job",))
        if account.calm_us is not None:
            text = "A calm step: the median that others are compared with"
            yield _gauge("ftar_calm_step_seconds", text, [((job,), account.calm_us / 1e6)], ("job",))
        labels = ("job", "category", "cause")
        seconds = CounterMetricFamily("ftar_training_seconds", "Where the job's time went", labels=labels)
        counts = CounterMetricFamily(
            "ftar_training_occasions", "Steps (productive, degraded), or how often it happened", labels=labels
        )
        for entry in account.spent:
            names = (job, entry.category.value, entry.cause.value if entry.cause is not None else "")
            seconds.add_metric(names, entry.us / 1e6)
            counts.add_metric(names, entry.count)
        yield seconds
        yield counts


class JobCheckpoints(Collector):
    """Of a job that has one, or has failed to write one. `now`: Unix seconds."""

    def __init__(self, job: str, view: CheckpointView, now: float) -> None:
        self._job, self._view, self._now = job, view, now

    def collect(self) -> Iterator[Metric]:
        view, labels = self._view, ("job",)
        if not view.step and not view.failures:
            return
        values: list[tuple[str, str, float]] = []
        if view.step:
            values.append(("step", "Step of the newest complete checkpoint", view.step))
        if view.step and view.time:
            values += [
                ("age_seconds", "Since the newest checkpoint was complete", max(0.0, self._now - view.time)),
                ("bytes", "Size of the newest complete checkpoint", view.bytes),
                ("write_seconds", "From the end of its step until it was complete", view.seconds),
            ]
        if view.failures:
            since = max(0.0, self._now - view.failed_time)
            values.append(("failed_step", "Step of the newest checkpoint that failed", view.failed_step))
            values.append(("failure_age_seconds", "Since a checkpoint could not be written", since))
        for name, text, value in values:
            yield _gauge(f"ftar_checkpoint_{name}", text, [((self._job,), value)], labels)
        counter = CounterMetricFamily("ftar_checkpoint_failures", "Checkpoints that were not written", labels=labels)
        counter.add_metric((self._job,), view.failures)
        yield counter


def _bytes(mb: float | None) -> float | None:
    return None if mb is None else mb * 2**20


def _gauge(
    name: str, text: str, samples: Sequence[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, float(value))
    return family
