"""How much may be hit at once: the rules of the blast radius, with their defaults. Pure; standard library only.

A fault hits its node and the replicas that feel it: those whose processes it touches, and for a fault on a rail, a GPU
or a whole node all that have processes there. A replica that does not contribute, for whatever reason, is hit already.
What is hit already may be hit again: no rule counts a thing twice.

| rule, which is also the setting's name | default | says |
|---|---|---|
| faults | 8 | so many faults are in force at once, on all nodes together |
| nodes_percent | 50 | of the nodes have a fault in force or do not answer; one always may |
| replicas_percent | 50 | of the job's replicas are hit; one always may |
| same_replica | true | while a replica is hit, faults hit no other: a run takes one down, and not two |

An agent knows its own faults and asks the coordinator for the replicas. What is in force elsewhere it is told by
whoever asks for a fault, who can only make it refuse more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, get_args

FELT_BY_NOBODY = ("noop", "agent-kill")
FELT_BY_NOBODY = ("noop", "agent-kill")
Rule = Literal["faults", "nodes_percent", "replicas_percent", "same_replica"]
RULES: tuple[Rule, ...] = get_args(Rule)
# What a request may lift, with a reason. The last is no limit: a fault that cuts the agent off.
Override = Rule | Literal["cut_off"]
OVERRIDES: tuple[Override, ...] = (*RULES, "cut_off")


@dataclass(frozen=True)
class Blast:
    """`source`: where the limits stand, as people call it: a file."""

    faults: int = 8
    nodes_percent: float = 50.0
    replicas_percent: float = 50.0
    same_replica: bool = True
    source: str = ""

    @property
    def counts_replicas(self) -> bool:
        return self.same_replica or self.replicas_percent < 100.0


NO_LIMITS = Blast(2**31, 100.0, 100.0, same_replica=False)


def felt(kind: str, target: str, replica: str, here: Collection[str]) -> tuple[str, ...]:
    """The replicas that feel a fault. `target`: the kind's; `here`: those with processes on its node."""
    if kind in FELT_BY_NOBODY or target == "coordinator":
        return ()
    return (replica,) if target == "replica" else tuple(sorted(here))


@dataclass(frozen=True)
class Hit:
    """A fault that is in force, or is to be."""

    id: str
    kind: str
    node: str
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """What is known of the cluster: how many nodes and replicas it has (0: not known), what is hit there."""

    nodes: int = 0
    silent: tuple[str, ...] = ()  # nodes that do not answer
    replicas: int = 0
    out: tuple[str, ...] = ()  # replicas that should contribute and do not
    hits: tuple[Hit, ...] = ()


NO_FLEET = Fleet()


@dataclass(frozen=True)
class Exceeded:
    """`rule`: one of RULES, which is what overrides it; it is the setting in `source`, too."""

    rule: Rule
    reason: str
    source: str


def exceeded(new: Hit, fleet: Fleet, limits: Blast, override: Collection[str] = ()) -> Exceeded | None:
    """The first rule, not overridden, that this fault would break."""
    checks: dict[Rule, Callable[[Hit, Fleet, Blast], str]] = {
        "faults": _faults,
        "nodes_percent": _nodes,
        "replicas_percent": _replicas,
        "same_replica": _same_replica,
    }
    for rule, check in checks.items():
        if rule not in override and (reason := check(new, fleet, limits)):
            return Exceeded(rule, reason, limits.source)
    return None


def _faults(new: Hit, fleet: Fleet, limits: Blast) -> str:
    others = [hit for hit in fleet.hits if hit.id != new.id]
    if len(others) < limits.faults:
        return ""
    some = ", ".join(f"{hit.id} on {hit.node}" for hit in others[:4]) + (" ..." if len(others) > 4 else "")
    return f"{len(others)} faults are in force ({some}), and {limits.faults} may be at once"


def _nodes(new: Hit, fleet: Fleet, limits: Blast) -> str:
    hit = {one.node for one in fleet.hits} | set(fleet.silent)
    if not fleet.nodes or new.node in hit or not hit:
        return ""
    may = _share(limits.nodes_percent, fleet.nodes)
    if len(hit) < may:
        return ""
    silent = f" (no answer from {_some(fleet.silent)})" if fleet.silent else ""
    reason = f"{_some(hit)} of {fleet.nodes} nodes are hit already{silent}"
    return f"{reason}, and {limits.nodes_percent:g} % ({may}) may be at once"


def _replicas(new: Hit, fleet: Fleet, limits: Blast) -> str:
    hit = {replica for one in fleet.hits for replica in one.replicas} | set(fleet.out)
    if not fleet.replicas or set(new.replicas) <= hit:
        return ""
    may = _share(limits.replicas_percent, fleet.replicas)
    if len(hit | set(new.replicas)) <= may:
        return ""
    already = f"; {_some(hit)} hit already, or not contributing" if hit else ""
    reason = f"it would hit {_some(new.replicas)} of {fleet.replicas} replicas{already}"
    return f"{reason}, and {limits.replicas_percent:g} % ({may}) may be at once"


def _same_replica(new: Hit, fleet: Fleet, limits: Blast) -> str:
    hit = {replica for one in fleet.hits for replica in one.replicas} | set(fleet.out)
    more = [replica for replica in new.replicas if replica not in hit]
    if not limits.same_replica or not hit or not more:
        return ""
    why = next((f"fault {one.id}, {one.kind}" for one in fleet.hits if one.replicas), "not contributing")
    return f"it would hit {_some(more)}, and {_some(hit)} already is hit ({why}): one replica at a time"


def _share(percent: float, count: int) -> int:
    """At least one, or nothing could be tried in a small cluster."""
    return max(1, int(percent * count / 100.0))


def _some(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
