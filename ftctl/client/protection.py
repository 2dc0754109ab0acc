"""What the agents say that no fault may touch: the rule, or nothing. Pure."""

from __future__ import annotations

from agents.api.models import NodeView
from ftctl.client.cluster import Snapshot


def of_node(view: NodeView) -> str:
    return next(filter(None, (rules.protection().node(view.name) for rules in view.protect)), "")


def of_nic(view: NodeView, nic: str) -> str:
    found = (rules.protection().nic(view.name, nic) for rules in view.protect)
    return of_node(view) or next(filter(None, found), "")


def of_replica(snapshot: Snapshot, replica: str) -> str:
    """The rule of any node: one that protects it anywhere is meant everywhere."""
    found = (rules.protection().replica(replica) for view in snapshot.views() for rules in view.protect)
    return next(filter(None, found), "")
