"""Would an agent make this fault beside others that are asked for at the same time? For `ftctl chaos plan`, whose
requests change nothing, so that no agent sees the others of a parallel group. Pure; the rules are those of the agents'
guard: what is taken already, the last healthy rail, the blast radius, the last healthy replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agents.api.blast import exceeded
from agents.api.faultspecs import SPECS
from agents.api.models import InjectRequest, JobState, NodeView
from agents.api.safety import HitSaid
from ftctl.client import fleet

Views = Mapping[str, NodeView | None]


@dataclass(frozen=True)
class Asked:
    request: InjectRequest
    node: str

    def hit(self, views: Views) -> HitSaid | None:
        return fleet.of_request(self.request, self.node, views.get(self.node))

    def __str__(self) -> str:
        return f"{self.request.kind} on {'/'.join(filter(None, (self.node, self.request.nic, self.request.replica)))}"


@dataclass(frozen=True)
class Conflict:
    """Why not, and what overrides it; empty: nothing does."""

    reason: str
    hint: str = ""


def conflict(new: Asked, others: Sequence[Asked], views: Views, job: JobState | None) -> Conflict | None:
    """`others`: what would be made before it, of the same group."""
    return (
        _taken(new, others)
        or _blast(new, others, views, job)
        or _last_rail(new, others, views.get(new.node))
        or _last_replica(new, others, views, job)
    )


def _taken(new: Asked, others: Sequence[Asked]) -> Conflict | None:
    """One fault on a NIC, on a process and on a whole node at a time."""
    one = new.request
    for other in (other for other in others if other.node == new.node):
        two = other.request
        ranks = one.rank is None or two.rank is None or one.rank == two.rank
        whole = [SPECS[request.kind].whole_node for request in (one, two)]
        parts = [SPECS[request.kind].target in ("nic", "replica") for request in (one, two)]
        gpus = SPECS[one.kind].target == SPECS[two.kind].target == "gpu"
        same_gpu = gpus and one.params.get("gpu") == two.params.get("gpu")
        if (
            (one.nic and one.nic == two.nic)
            or (one.replica and one.replica == two.replica and ranks)
            or same_gpu
            or all(whole)
            or (whole[0] and parts[1])
            or (whole[1] and parts[0])
        ):
            return Conflict(f"{other} would be there at the same time")
    return None


def _blast(new: Asked, others: Sequence[Asked], views: Views, job: JobState | None) -> Conflict | None:
    hit, view = new.hit(views), views.get(new.node)
    if hit is None or view is None or view.blast is None:
        return None
    known = fleet.said(views, [found for other in others if (found := other.hit(views))]).fleet()
    wanted, out = (job.replicas_wanted, _out(job)) if job is not None else (0, ())
    limits = [view.blast.limits()] + ([] if new.request.blast is None else [new.request.blast.limits()])
    whole = replace(known, replicas=wanted, out=out)
    for rules in limits:
        if broken := exceeded(hit.hit(), whole, rules, new.request.override or ()):
            reason = f"{broken.reason} (blast_radius: {broken.rule} in {broken.source})"
            return Conflict(reason, f"--override {broken.rule} --reason TEXT overrides this")
    return None


def _last_rail(new: Asked, others: Sequence[Asked], view: NodeView | None) -> Conflict | None:
    spec = SPECS[new.request.kind]
    if view is None or spec.target != "nic" or not spec.takes_out or new.request.allow_last_rail:
        return None
    asked = {other.request.nic for other in others if other.node == new.node}
    faulted = {fault.target.partition("/")[2] for fault in view.faults if not fault.state.over}
    left = [nic for nic in view.nics if nic.role == "rail" and nic.up and nic.carrier and nic.name not in faulted]
    if not asked or any(nic.name not in asked | {new.request.nic} for nic in left):
        return None
    reason = f"{new.request.nic} would be the last healthy rail of {new.node}: its replica would lose all its peers"
    return Conflict(reason, "--allow-last-rail --reason TEXT overrides this")


def _last_replica(new: Asked, others: Sequence[Asked], views: Views, job: JobState | None) -> Conflict | None:
    if job is None or new.request.allow_last_replica:
        return None
    own = _lost(new, views)
    lost = own.union(*(_lost(other, views) for other in others))
    contributing = [one.name for one in job.replicas if one.state == "contributing"]
    left = [name for name in contributing if name not in lost]
    if not own & set(contributing) or len(left) >= max(1, job.min_replicas):
        return None
    rest = f"only {', '.join(left)}" if left else "no replica"
    reason = f"without {', '.join(name for name in contributing if name in lost)} {rest} would contribute"
    return Conflict(reason, "--allow-last-replica --reason TEXT overrides this")


def _lost(asked: Asked, views: Views) -> set[str]:
    """The replicas that would not contribute while it is in force."""
    spec, view = SPECS[asked.request.kind], views.get(asked.node)
    if not spec.takes_out or spec.target not in ("replica", "node", "gpu"):
        return set()
    if spec.target == "replica":
        return {asked.request.replica} if asked.request.replica else set()
    return set(fleet.replicas_on(view)) if view is not None else set()


def _out(job: JobState) -> tuple[str, ...]:
    contributing = sum(one.state == "contributing" for one in job.replicas)
    if contributing >= job.replicas_wanted:
        return ()
    return tuple(one.name for one in job.replicas if one.state not in ("contributing", "spare", "draining"))
