"""From a fault of a playbook to what is asked of an agent: the target that is meant, and the request."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from agents.api.faultspecs import SPECS
from agents.api.models import InjectRequest
from ftctl.client import injection
from ftctl.client.aiming import where_the_coordinator_is, with_addresses
from ftctl.client.cluster import Agents, Snapshot
from ftctl.playbook import schema as s
from ftctl.playbook.rules import Rules
from ftctl.playbook.selecting import Aim, resolve

DEAD_MAN_S = 10.0  # agents take faults back when this controller is silent for so long


async def aim_of(agents: Agents, fault: s.Fault, snapshot: Snapshot, rng: Random) -> Aim:
    """What is meant by its target; of a node that is taken out, its replica too: it is the one that is lost, and no
    survivor. Raises CliError."""
    aim = resolve(fault.target, snapshot, rng)
    if aim.node and not aim.replica and SPECS[fault.inject].target == "node" and SPECS[fault.inject].takes_out:
        there = [r.name for r in snapshot.job.replicas if aim.node in snapshot.hosts(r.name)] if snapshot.job else []
        return replace(aim, replica=there[0]) if len(there) == 1 else aim
    if not aim.node and SPECS[fault.inject].target == "coordinator":
        nodes = [view.name for view in snapshot.views()]
        return replace(aim, node=await where_the_coordinator_is(agents, fault.inject, nodes))
    return aim


async def request_for(
    agents: Agents, fault: s.Fault, aim: Aim, reason: str, rules: Rules, *, dry_run: bool = False
) -> InjectRequest:
    """Raises CliError."""
    spec = SPECS[fault.inject]
    return InjectRequest(
        kind=fault.inject,
        nic=aim.nic or None if spec.target == "nic" else None,
        replica=aim.replica or None if spec.target == "replica" else None,
        duration_s=fault.duration,
        reason=reason,
        rank=aim.rank if spec.target == "replica" else None,
        params=await with_addresses(agents, spec, fault.params),
        request_id=injection.new_request_id(),
        dry_run=dry_run,
        allow_last_rail=fault.allow_last_rail,
        allow_last_replica=fault.allow_last_replica,
        dead_man_s=DEAD_MAN_S,
        protect=rules.protect,
        blast=rules.blast,
        override=fault.override or None,
    )
