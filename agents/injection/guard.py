"""May this fault be made? Pure: facts in, refusal or None out. A refusal says why, and what overrides it if anything.

What only one kind of fault can know (a bond member, a device stacked on this one) is in that fault's `check`. Whether
enough replicas would be left is asked of the coordinator just before; two agents that are asked in the same moment may
both find enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from agents.api.blast import FELT_BY_NOBODY, NO_FLEET, NO_LIMITS, Blast, Fleet, Hit, exceeded, felt
from agents.api.faultspecs import SPECS, Param
from agents.api.protect import Protection
from agents.faults.contract import Params, Refusal
from agents.host.links import Nic, find

MIN_DEAD_MAN_S = 1.0
CUT_OFF_S = 10.0  # a fault that cuts the agent off is taken back when nobody was heard for so long
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - what is compared with, not what is bound


@dataclass(frozen=True)
class Limits:
    """From the agent's settings. Durations in seconds."""

    node: str
    rails: tuple[str, ...]
    management_nic: str | None
    max_faults: int
    max_duration_s: float
    protection: tuple[Protection, ...] = ()
    blast: Blast = NO_LIMITS
    listen: str | None = None  # the address at which the agent is reached; None: over a Unix socket only


@dataclass(frozen=True)
class JobFacts:
    """What the coordinator says. `problem`: why it could not be asked; `known` false without one: there is none.
    `wanted`: how many replicas should contribute; `out`: those that should and do not."""

    known: bool = False
    contributing: tuple[str, ...] = ()
    min_replicas: int = 0
    problem: str = ""
    wanted: int = 0
    out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wish:
    """`takes_out`, `whole_node` and `rails` as in the fault's spec. `rank` below 0: all of the replica here.
    `protection`, `blast`: of whoever asks, beside the agent's own; `fleet`: what it knows of other nodes."""

    kind: str
    target: str  # the fault's kind of target
    nic: str
    duration_s: float
    dead_man_s: float | None
    allow_last_rail: bool
    replica: str = ""
    rank: int = -1
    takes_out: bool = True
    whole_node: bool = False
    allow_last_replica: bool = False
    gpu: int = -1
    rails: bool = False
    protection: tuple[Protection, ...] = ()
    blast: Blast = NO_LIMITS
    fleet: Fleet = NO_FLEET
    override: tuple[str, ...] = ()
    via: str = ""  # the address of this node over which the request came; empty: a Unix socket
    client: str = ""  # where it came from
    peers: tuple[str, ...] = ()  # addresses that the fault cuts off


@dataclass(frozen=True)
class OpenFault:
    id: str
    kind: str
    nic: str
    left_s: float
    replica: str = ""
    rank: int = -1
    whole_node: bool = False
    gpu: int = -1


@dataclass(frozen=True)
class Facts:
    nics: tuple[Nic, ...]
    open: tuple[OpenFault, ...]
    default_route: frozenset[int]  # indexes of devices that carry a default route
    replicas: tuple[str, ...] = ()  # with processes on this node
    job: JobFacts = JobFacts()
    addresses: tuple[tuple[str, str], ...] = ()  # (device, address)


def judge(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    return (
        _duration(wish, limits)
        or (_nic(wish, facts, limits) if wish.target == "nic" else None)
        or _protected(wish, facts, limits)
        or reachable(wish, facts, limits)
        or _replica(wish, facts)
        or _gpu(wish, facts)
        or _whole_node(wish, facts, limits)
        or _count(facts, limits)
        or blast_radius(wish, facts, limits)
        or (_last_rail(wish, facts, limits) if wish.target == "nic" and wish.takes_out else None)
        or (
            _last_replica(wish, facts, limits) if wish.target in ("replica", "node", "gpu") and wish.takes_out else None
        )
    )


def _duration(wish: Wish, limits: Limits) -> Refusal | None:
    cap = f"at most {limits.max_duration_s:g} s on this node (max_duration_s)"
    if not math.isfinite(wish.duration_s) or wish.duration_s <= 0:
        return Refusal("bad-duration", f"a duration of {wish.duration_s:g} s is not above 0", f"--duration: {cap}")
    if wish.duration_s > limits.max_duration_s:
        return Refusal("bad-duration", f"a duration of {wish.duration_s:g} s is too long: {cap}", f"--duration: {cap}")
    if wish.dead_man_s is not None and not MIN_DEAD_MAN_S <= wish.dead_man_s <= limits.max_duration_s:
        text = f"dead_man_s of {wish.dead_man_s:g} s is not between {MIN_DEAD_MAN_S:g} and {limits.max_duration_s:g}"
        return Refusal("bad-duration", text)
    return None


def _nic(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    if not wish.nic:
        return Refusal("bad-request", f"{wish.kind} needs a NIC", "name one with --nic")
    nic = find(facts.nics, wish.nic)
    rails = ", ".join(limits.rails) or "none"
    if nic is None:
        return Refusal("unknown-nic", f"{limits.node} has no network device {wish.nic}", f"rails here: {rails}")
    if wish.nic == limits.management_nic:
        reason = f"{wish.nic} is the management NIC: the node could not be reached any more"
        return Refusal("refused", reason, f"rails here: {rails}")
    if wish.nic not in limits.rails:
        reason = f"{wish.nic} is not declared as a rail"
        return Refusal("refused", reason, f"rails here: {rails}; to add one: `rails` in the agent's configuration")
    if limits.management_nic is None and nic.index in facts.default_route:
        reason = f"{wish.nic} carries the default route, so it may be the way to this node"
        return Refusal("refused", reason, "name the management NIC (`management_nic`) in the agent's configuration")
    return next((_taken(fault, wish.nic) for fault in facts.open if fault.nic == wish.nic), None)


def _protected(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    """No flag overrides this. Faults on processes touch those; all others are felt by every replica of the node."""
    nics = (wish.nic,) if wish.nic else limits.rails if wish.rails else ()
    replicas = {"replica": (wish.replica,), "coordinator": ()}.get(wish.target, facts.replicas)
    for protection in (*limits.protection, *wish.protection):
        if why := protection.why(limits.node, nics, replicas):
            return Refusal("refused", why, f"another target, or change `protect` in {protection.source}")
    return None


def cut_off(wish: Wish, facts: Facts, limits: Limits) -> str:
    """What would be lost of the way to the agent; empty: nothing. Where it listens at one address, that is the way;
    where it listens at all of them, the one over which the request came."""
    if not wish.takes_out:
        return ""
    if wish.client and wish.client in wish.peers:
        return f"{wish.client}, from where this is asked, would be cut off from {limits.node}"
    if wish.peers:
        return ""  # what it cuts off are other nodes
    way = wish.via if limits.listen in EVERYWHERE else limits.listen
    hit = (wish.nic,) if wish.nic else limits.rails if wish.rails else ()
    found = next((nic for nic, address in facts.addresses if way and address == way and nic in hit), "")
    return f"{found} has {way}, at which this agent is reached" if found else ""


def reachable(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    if "cut_off" in wish.override or not (why := cut_off(wish, facts, limits)):
        return None
    hint = f"--override cut_off --reason TEXT: it is then taken back after {CUT_OFF_S:g} s without its controller"
    return Refusal("refused", f"{why}: nobody could take the fault back from afar", hint)


def _replica(wish: Wish, facts: Facts) -> Refusal | None:
    """One fault on a process at a time: two that stop it would resume it for each other."""
    if wish.target != "replica":
        return None
    if not wish.replica:
        return Refusal("bad-request", f"{wish.kind} needs a replica", "name one with --replica")
    for fault in facts.open:
        if fault.replica == wish.replica and (fault.rank < 0 or wish.rank < 0 or fault.rank == wish.rank):
            return _taken(fault, wish.replica)
    return None


def _gpu(wish: Wish, facts: Facts) -> Refusal | None:
    """One fault on a GPU, and one on the driver, at a time: two would put back what the other one had changed."""
    if wish.target != "gpu":
        return None
    for fault in facts.open:
        if fault.kind == wish.kind if wish.gpu < 0 else fault.gpu == wish.gpu:
            return _taken(fault, f"GPU {wish.gpu}" if wish.gpu >= 0 else "the driver")
    return None


def _whole_node(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    on_parts = wish.target in ("nic", "replica")
    for fault in facts.open:
        if (fault.whole_node and (on_parts or wish.whole_node)) or (wish.whole_node and (fault.nic or fault.replica)):
            return _taken(fault, fault.nic or fault.replica or limits.node)
    return None


def _taken(fault: OpenFault, thing: str) -> Refusal:
    reason = f"fault {fault.id} ({fault.kind}, {max(0.0, fault.left_s):.0f} s left) is on {thing} already"
    return Refusal("refused", reason, f"ftctl revert {fault.id}")


def _count(facts: Facts, limits: Limits) -> Refusal | None:
    if len(facts.open) < limits.max_faults:
        return None
    names = ", ".join(fault.id for fault in facts.open)
    reason = f"{len(facts.open)} faults are in force on {limits.node} already ({names}), and {limits.max_faults} may be"
    return Refusal("refused", reason, "ftctl revert ID, or raise `max_faults` in the agent's configuration")


def blast_radius(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    """Rules of agents/api/blast.py, those of the agent and then those of whoever asks."""
    if wish.kind in FELT_BY_NOBODY:
        return None
    new = Hit("", wish.kind, limits.node, felt(wish.kind, wish.target, wish.replica, facts.replicas))
    own = tuple(_hit(fault, facts, limits) for fault in facts.open if fault.kind not in FELT_BY_NOBODY)
    said, job = wish.fleet, facts.job
    fleet = replace(
        said,
        silent=tuple(node for node in said.silent if node != limits.node),
        replicas=job.wanted,
        out=job.out,
        hits=(*own, *(hit for hit in said.hits if hit.node != limits.node)),
    )
    for rules in (limits.blast, wish.blast):
        if found := exceeded(new, fleet, rules, wish.override):
            reason = f"{found.reason} (blast_radius: {found.rule} in {found.source})"
            return Refusal("refused", reason, f"--override {found.rule} --reason TEXT overrides this")
    return None


def _hit(fault: OpenFault, facts: Facts, limits: Limits) -> Hit:
    spec = SPECS.get(fault.kind)
    target = spec.target if spec is not None else "replica" if fault.replica else "node"
    return Hit(fault.id, fault.kind, limits.node, felt(fault.kind, target, fault.replica, facts.replicas))


def _last_rail(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    """One healthy rail must remain: with none the node's ranks lose all their peers and the replica dies."""
    if wish.allow_last_rail:
        return None
    faulted = {fault.nic for fault in facts.open}
    others = [n for n in facts.nics if n.name in limits.rails and n.name != wish.nic and n.name not in faulted]
    if any(n.up and n.carrier for n in others):
        return None
    reason = f"{wish.nic} is the last healthy rail of {limits.node}: its replica would lose all its peers"
    return Refusal("refused", reason, "--allow-last-rail --reason TEXT overrides this")


def _last_replica(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    """Enough replicas must be left that the job goes on."""
    if wish.allow_last_replica:
        return None
    override = "--allow-last-replica --reason TEXT overrides this"
    job = facts.job
    if job.problem:
        return Refusal("refused", f"how many replicas would be left cannot be told: {job.problem}", override)
    hit = {wish.replica} if wish.target == "replica" else set(facts.replicas)
    out = [name for name in job.contributing if name in hit]
    left = [name for name in job.contributing if name not in hit]
    if not job.known or not out or len(left) >= max(1, job.min_replicas):
        return None
    rest = f"only {', '.join(left)}" if left else "no replica"
    needed = f", and the job needs at least {job.min_replicas}" if job.min_replicas > len(left) else ""
    return Refusal("refused", f"without {', '.join(out)} {rest} would contribute{needed}", override)


def check_params(specs: tuple[Param, ...], given: Params) -> Params | Refusal:
    """Parameters complete and in range, or why not. A whole number will do for a float, never the other way."""
    known = {spec.name: spec for spec in specs}
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            return Refusal("bad-request", f"there is no parameter {name} (there are: {names})")
    result: Params = {}
    for spec in specs:
        value = given.get(spec.name, spec.default)
        if value is None:
            return Refusal("bad-request", f"parameter {spec.name} is required: {spec.help}")
        if problem := spec.problem(value):
            return Refusal("bad-request", f"parameter {spec.name} {problem}")
        result[spec.name] = float(value) if spec.type == "float" else value
    return result
