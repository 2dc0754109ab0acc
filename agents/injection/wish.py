"""What is asked for, and what is open already, in the words of the guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.api.protect import Protection
from agents.faults.catalog import AnyFault
from agents.faults.contract import Params, Target
from agents.injection.guard import OpenFault, Wish
from agents.injection.ledger import Entry


@dataclass(frozen=True)
class Injection:
    """A wish to inject, checked for form only. `nic` and `replica` empty where not given; durations in seconds.
    `protection`: what whoever asks has protected beside what is protected here."""

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
    )


def open_fault(entry: Entry, now_boot_s: float, catalog: Mapping[str, AnyFault]) -> OpenFault:
    target = entry.target
    known = catalog.get(entry.kind)
    whole = known is not None and known.spec.whole_node
    left_s = entry.due_boot_s() - now_boot_s
    return OpenFault(entry.id, entry.kind, target.nic, left_s, target.replica, target.rank, whole, target.gpu)
