"""What a condition may ask about, and its value in a snapshot of the cluster. The names are a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean

from agents.api.models import FaultState, JobState, NicView, ReplicaState
from ftctl.client.cluster import Agents, Snapshot
from ftctl.client.replicas import STATES
from ftctl.playbook import metrics
from ftctl.playbook.expressions import Expression, Unknown, Value

REPLICA_FIELDS = ("state", "step", "loss", "incarnation", "slot", "pace", "straggler", "heartbeat_age_ms", "reason")
RAIL_FIELDS = ("state", "up", "carrier", "injected", "speed_mbit")
GPU_FIELDS = ("state", "reason", "utilization_percent", "temperature_c", "memory_used_mb", "power_w")
JOB_FIELDS = ("state", "step", "epoch", "term", "loss", "step_ms", "reason", "replicas_wanted", "min_replicas")

# fact -> what it is; X stands for a name
CATALOG: dict[str, str] = {
    "replicas.STATE": f"how many replicas are in a state: {', '.join(STATES)}",
    "replicas.total": "how many the coordinator knows",
    "replica.X.FIELD": f"of one replica: {', '.join(REPLICA_FIELDS)}",
    "job.FIELD": f"of the job: {', '.join(JOB_FIELDS)}",
    "rail.NODE/NIC.FIELD": f"of a rail: {', '.join(RAIL_FIELDS)}",
    "gpu.NODE/INDEX.FIELD": f"of a GPU: {', '.join(GPU_FIELDS)}",
    "rails.down": "rails that are not up, on all nodes that answer",
    "faults.active": "faults in force or under way",
    "faults.stuck": "faults that could not be taken back",
    "agents.reachable": "agents that answer",
    "agents.unreachable": "agents that do not",
    "metric.NAME{label=value,...}": "of the agents' /metrics; `node` is the agent; metric.sum:NAME for several series",
}


@dataclass(frozen=True)
class Facts:
    """Looks facts up in one snapshot, and in the metrics that were read for the condition."""

    snapshot: Snapshot
    said: metrics.Read = field(default_factory=dict)

    def __call__(self, fact: str) -> Value:
        """Raises Unknown."""
        if fact.startswith(metrics.PREFIX):
            return metrics.value(fact, self.said)
        head, _, rest = fact.partition(".")
        look = _HEADS.get(head)
        if look is None or not rest:
            raise Unknown(f"{fact} is no fact (there are: {', '.join(CATALOG)})")
        return look(self.snapshot, rest)


async def look(agents: Agents, condition: Expression, snapshot: Snapshot) -> Facts:
    """The snapshot, and what else this condition asks about."""
    return Facts(snapshot, await metrics.read(agents, condition))


def problem(fact: str) -> str:
    """What is wrong with the name of a fact; empty if it can be asked for. What a cluster has is not known here."""
    if fact.startswith(metrics.PREFIX):
        return metrics.problem(fact)
    head, _, rest = fact.partition(".")
    *_, last = fact.split(".")
    fields: dict[str, tuple[str, ...]] = {
        "replicas": (*STATES, "total"),
        "replica": REPLICA_FIELDS,
        "job": JOB_FIELDS,
        "rail": RAIL_FIELDS,
        "gpu": GPU_FIELDS,
        "rails": ("down",),
        "faults": ("active", "stuck"),
        "agents": ("reachable", "unreachable"),
    }
    if head not in fields:
        return f"there is no fact {fact} (there are: {', '.join(CATALOG)})"
    if head in ("replica", "rail", "gpu") and rest.count(".") < 1:
        examples = {"replica": "replica.r1.state", "gpu": "gpu.node1/0.state"}
        example = examples.get(head, "rail.node1/rail0.up")
        return f"{fact} needs a name and a field, such as {example}"
    if head == "rail" and "/" not in rest:
        return f"{fact} needs a node and a NIC, such as rail.node1/rail0.up"
    if head == "gpu" and "/" not in rest:
        return f"{fact} needs a node and a number, such as gpu.node1/0.state"
    if last not in fields[head]:
        return f"{fact}: there is no {last} of {head} (there are: {', '.join(fields[head])})"
    return ""


def _job(snapshot: Snapshot) -> JobState:
    if snapshot.job is None:
        raise Unknown(f"job {snapshot.job_name} does not answer")
    return snapshot.job


def _replicas(snapshot: Snapshot, rest: str) -> Value:
    job = _job(snapshot)
    return len(job.replicas) if rest == "total" else sum(replica.state == rest for replica in job.replicas)


def _replica(snapshot: Snapshot, rest: str) -> Value:
    name, _, field = rest.rpartition(".")
    found: ReplicaState | None = next((r for r in _job(snapshot).replicas if r.name == name), None)
    if found is None:
        raise Unknown(f"replica {name} is not known to the coordinator")
    return _field(f"replica {name}", found, field, REPLICA_FIELDS)


def _of_job(snapshot: Snapshot, field: str) -> Value:
    job = _job(snapshot)
    if field == "loss":
        losses = [r.loss for r in job.replicas if r.state == "contributing" and r.loss is not None]
        if not losses:
            raise Unknown("no replica has reported a loss yet")
        return fmean(losses)
    if field == "step_ms":
        return _known("the length of a step", job.step_ms_median)
    return _field("job", job, field, JOB_FIELDS)


def _rail(snapshot: Snapshot, rest: str) -> Value:
    where, _, field = rest.rpartition(".")
    node, _, nic = where.partition("/")
    view = next((view for view in snapshot.views() if view.name == node), None)
    if view is None:
        raise Unknown(f"the agent of {node} does not answer")
    found: NicView | None = next((n for n in view.nics if n.name == nic), None)
    if found is None:
        raise Unknown(f"{node} has no NIC {nic}")
    if field == "up":
        return found.present and found.up and found.carrier
    return _field(where, found, field, RAIL_FIELDS)


def _rails(snapshot: Snapshot, rest: str) -> Value:
    rails = [nic for view in snapshot.views() for nic in view.nics if nic.role == "rail"]
    if rest != "down":
        raise Unknown(f"rails.{rest} is no fact (there is: rails.down)")
    return sum(not (nic.present and nic.up and nic.carrier) for nic in rails)


def _gpu(snapshot: Snapshot, rest: str) -> Value:
    where, _, field = rest.rpartition(".")
    node, _, index = where.partition("/")
    view = next((view for view in snapshot.views() if view.name == node), None)
    if view is None:
        raise Unknown(f"the agent of {node} does not answer")
    found = next((gpu for gpu in view.gpus.devices if str(gpu.index) == index), None)
    if found is None:
        raise Unknown(f"{node} has no GPU {index}")
    return _field(f"GPU {where}", found, field, GPU_FIELDS)


def _faults(snapshot: Snapshot, rest: str) -> Value:
    states = {
        "active": (FaultState.ARMED, FaultState.ACTIVE, FaultState.REVERTING),
        "stuck": (FaultState.STUCK,),
    }.get(rest)
    if states is None:
        raise Unknown(f"faults.{rest} is no fact (there are: faults.active, faults.stuck)")
    return sum(fault.state in states and not fault.irreversible for fault in snapshot.faults())


def _agents(snapshot: Snapshot, rest: str) -> Value:
    counts = {"reachable": len(snapshot.views()), "unreachable": len(snapshot.nodes) - len(snapshot.views())}
    if rest not in counts:
        raise Unknown(f"agents.{rest} is no fact (there are: agents.reachable, agents.unreachable)")
    return counts[rest]


def _field(thing: str, found: object, field: str, fields: tuple[str, ...]) -> Value:
    if field not in fields:
        raise Unknown(f"{thing} has no {field} (it has: {', '.join(fields)})")
    value = getattr(found, field)
    return _known(f"{field} of {thing}", value.value if isinstance(value, Enum) else value)


def _known(thing: str, value: Value | None) -> Value:
    if value is None:
        raise Unknown(f"{thing} is not known yet")
    return value


_HEADS: dict[str, Callable[[Snapshot, str], Value]] = {
    "replicas": _replicas,
    "replica": _replica,
    "job": _of_job,
    "rail": _rail,
    "rails": _rails,
    "gpu": _gpu,
    "faults": _faults,
    "agents": _agents,
}
