"""From what a playbook aims at to a node, a NIC, a replica. Pure: a snapshot and a seeded random in, names out."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from agents.api.models import NodeView
from ftctl.client.cluster import Snapshot
from ftctl.client.selection import rail_device
from ftctl.errors import CliError, UsageProblem
from ftctl.playbook.schema import Target


@dataclass(frozen=True)
class Aim:
    """What is meant: empty where the action does not ask for it."""

    node: str = ""
    nic: str = ""
    replica: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        place = "/".join(part for part in (self.node, self.nic) if part)
        who = self.replica + (f" rank {self.rank}" if self.rank is not None else "")
        return " ".join(part for part in (who, f"on {place}" if who and place else place) if part) or "the job"


def resolve(target: Target, snapshot: Snapshot, rng: Random) -> Aim:
    """Raises CliError for a selector that selects nothing."""
    replica = pick_replica(target.replica, snapshot, rng) if target.replica else ""
    node = _node(target, replica, snapshot, rng)
    nic = target.nic or ""
    if target.rail is not None:
        nic = _rail(target, _view(snapshot, node), replica, rng)
    return Aim(node, nic, replica, target.rank)


def pick_replica(text: str, snapshot: Snapshot, rng: Random) -> str:
    """A replica by name; `any`: one that contributes. Raises CliError."""
    if text != "any":
        return snapshot.replica(text)
    able = sorted(r.name for r in snapshot.job.replicas if r.state == "contributing") if snapshot.job else []
    if not able:
        raise CliError("replica any", "no replica contributes, so none can be chosen", "ftctl status")
    return rng.choice(able)


def _node(target: Target, replica: str, snapshot: Snapshot, rng: Random) -> str:
    names = [view.name for view in snapshot.views()]
    if target.node == "any":
        hosts = [name for name in names if not replica or name in snapshot.hosts(replica)]
        if not hosts:
            raise CliError("node any", "no agent answers, so none can be chosen", "ftctl status")
        return rng.choice(sorted(hosts))
    if target.node:
        if target.node not in {node.name for node in snapshot.nodes}:
            known = ", ".join(node.name for node in snapshot.nodes)
            raise UsageProblem(f"node {target.node}", f"not in the inventory (it has {known})", "ftctl status")
        return target.node
    if not replica:
        return ""
    for view in snapshot.views():
        for process in view.processes:
            if process.replica == replica and (target.rank is None or process.rank == target.rank):
                return view.name
    if target.rank is not None:
        raise CliError(f"replica {replica}", f"no agent supervises its rank {target.rank}", "ftctl ranks")
    hosts = snapshot.hosts(replica)
    if not hosts:
        raise CliError(f"replica {replica}", "no agent knows where it runs", "ftctl ranks")
    return hosts[0]


def _view(snapshot: Snapshot, node: str) -> NodeView:
    for view in snapshot.views():
        if view.name == node:
            return view
    raise CliError(f"agent of {node}", "does not answer, so its rails are not known", "ftctl status")


def _rail(target: Target, view: NodeView, replica: str, rng: Random) -> str:
    if isinstance(target.rail, int):
        return rail_device(view, target.rail)
    rails = sorted(nic.name for nic in view.nics if nic.role == "rail" and nic.up and nic.carrier)
    if not rails:
        raise CliError(f"rail {target.rail} of {view.name}", "no rail of it is up", "ftctl status")
    if target.rail == "any":
        return rng.choice(rails)
    for rank in view.ranks:
        for link in rank.links:
            if link.active and link.direction == "out" and (not replica or rank.replica == replica):
                return link.rail
    raise CliError(f"the active rail of {view.name}", "no rank there reports an active link", "ftctl links")
