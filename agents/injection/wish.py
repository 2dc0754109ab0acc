"""What is asked for, and what is open already, in the words of the guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.api.blast import FELT_BY_NOBODY, NO_FLEET, NO_LIMITS, Blast, Fleet
from agents.api.protect import Protection
from agents.faults.catalog import AnyFault
from agents.faults.contract import Params, Target
from agents.host.machine import Machine
from agents.injection.guard import Limits, OpenFault, Wish
from agents.injection.ledger import Entry


@dataclass(frozen=True)
class Injection:
    """A wish to inject, checked for form only. `nic` and `replica` empty where not given; durations in seconds.
    `protection`, `blast`: what holds for whoever asks beside the agent's own; `fleet`: what they know of other nodes;
    `override`: limits that are not to hold, which takes a reason; `via`, `client`: of a request over the network, this
    node's address and that of whoever asks."""

    kind: str
    owner: str
    duration_s: float
    nic: str = ""
    replica: str = ""
    rank: int = -1
    reason: str = ""
    params: Params = field(default_factory=dict)
    request_id: str = ""
    dead_man_s: float | None = None
    allow_last_rail: bool = False
    allow_last_replica: bool = False
    dry_run: bool = False
    protection: tuple[Protection, ...] = ()
    blast: Blast = NO_LIMITS
    fleet: Fleet = NO_FLEET
    override: tuple[str, ...] = ()
    via: str = ""
    client: str = ""


def wish_of(fault: AnyFault, asked: Injection, target: Target) -> Wish:
    return Wish(
        kind=fault.kind,
        target=fault.target,
        nic=asked.nic,
        duration_s=asked.duration_s,
        dead_man_s=asked.dead_man_s,
        allow_last_rail=asked.allow_last_rail,
        replica=asked.replica,
        rank=asked.rank,
        takes_out=fault.spec.takes_out,
        whole_node=fault.spec.whole_node,
        allow_last_replica=asked.allow_last_replica,
        gpu=target.gpu,
        rails=fault.spec.rails,
        protection=asked.protection,
        blast=asked.blast,
        fleet=asked.fleet,
        override=asked.override,
        via=asked.via,
        client=asked.client,
        peers=tuple(part.strip() for part in str(asked.params.get("peers", "")).split(",") if part.strip()),
    )


def asks_the_job(fault: AnyFault, asked: Injection, limits: Limits) -> bool:
    """Do the guards need to know which replicas contribute? It costs a request to the coordinator."""
    if fault.kind in FELT_BY_NOBODY or fault.target == "coordinator":
        return False
    takes_some = fault.spec.takes_out and fault.target in ("replica", "node", "gpu") and not asked.allow_last_replica
    return takes_some or limits.blast.counts_replicas or asked.blast.counts_replicas


def addresses_of(machine: Machine, limits: Limits, asked: Injection) -> tuple[tuple[str, str], ...]:
    """(device, address); none are read where nobody comes over the network. Raises HostError."""
    if limits.listen is None and not asked.via:
        return ()
    names = {nic.index: nic.name for nic in machine.links.nics()}
    found = machine.links.all_addresses().items()
    return tuple((names[index], one.address) for index, own in found if index in names for one in own)


def open_fault(entry: Entry, now_boot_s: float, catalog: Mapping[str, AnyFault]) -> OpenFault:
    target = entry.target
    known = catalog.get(entry.kind)
    whole = known is not None and known.spec.whole_node
    left_s = entry.due_boot_s() - now_boot_s
    return OpenFault(entry.id, entry.kind, target.nic, left_s, target.replica, target.rank, whole, target.gpu)
