"""May this fault be made? Pure: facts in, refusal or None out. A refusal says why, and what overrides it if anything.

What only one kind of fault can know (a bond member, a device stacked on this one) is in that fault's `check`. What the
whole cluster must know (the last healthy replica, `min-replicas`) is the coordinator's to guard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.api.faultspecs import Param, ParamValue
from agents.faults.contract import Params, Refusal
from agents.host.links import Nic, find

TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
MIN_DEAD_MAN_S = 1.0
MAX_TEXT = 500


@dataclass(frozen=True)
class Limits:
    """From the agent's settings. Durations in seconds."""

    node: str
    rails: tuple[str, ...]
    management_nic: str | None
    max_faults: int
    max_duration_s: float


@dataclass(frozen=True)
class Wish:
    kind: str
    target: str  # the fault's kind of target
    nic: str
    duration_s: float
    dead_man_s: float | None
    allow_last_rail: bool


@dataclass(frozen=True)
class OpenFault:
    id: str
    kind: str
    nic: str
    left_s: float


@dataclass(frozen=True)
class Facts:
    nics: tuple[Nic, ...]
    open: tuple[OpenFault, ...]
    default_route: frozenset[int]  # indexes of devices that carry a default route


def judge(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    return (
        _duration(wish, limits)
        or (_nic(wish, facts, limits) if wish.target == "nic" else None)
        or _count(facts, limits)
        or (_last_rail(wish, facts, limits) if wish.target == "nic" else None)
    )


def _duration(wish: Wish, limits: Limits) -> Refusal | None:
    cap = f"at most {limits.max_duration_s:g} s on this node (max_duration_s)"
    if not math.isfinite(wish.duration_s) or wish.duration_s <= 0:
        return Refusal("bad-duration", f"a duration of {wish.duration_s:g} s is not above 0", f"--duration: {cap}")
    if wish.duration_s > limits.max_duration_s:
        return Refusal("bad-duration", f"a duration of {wish.duration_s:.0f} s is too long", f"--duration: {cap}")
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
    for fault in facts.open:
        if fault.nic == wish.nic:
            reason = f"fault {fault.id} ({fault.kind}, {max(0.0, fault.left_s):.0f} s left) is on {wish.nic} already"
            return Refusal("refused", reason, f"ftctl revert {fault.id}")
    return None


def _count(facts: Facts, limits: Limits) -> Refusal | None:
    if len(facts.open) < limits.max_faults:
        return None
    names = ", ".join(fault.id for fault in facts.open)
    reason = f"{len(facts.open)} faults are in force on {limits.node} already ({names}), and {limits.max_faults} may be"
    return Refusal("refused", reason, "ftctl revert ID, or raise `max_faults` in the agent's configuration")


def _last_rail(wish: Wish, facts: Facts, limits: Limits) -> Refusal | None:
    """One healthy rail must remain: with none the node's ranks lose all their peers and the replica dies."""
    if wish.allow_last_rail:
        return None
    faulted = {fault.nic for fault in facts.open}
    others = [n for n in facts.nics if n.name in limits.rails and n.name != wish.nic and n.name not in faulted]
    if any(n.up and n.carrier for n in others):
        return None
    reason = f"{wish.nic} is the last healthy rail of {limits.node}: its replica would lose all its peers"
    return Refusal("refused", reason, "--allow-last-rail overrides this")


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
        problem = _param_problem(spec, value)
        if problem:
            return Refusal("bad-request", f"parameter {spec.name} {problem}")
        result[spec.name] = float(value) if spec.type == "float" else value
    return result


def _param_problem(spec: Param, value: ParamValue) -> str:
    wanted = TYPES[spec.type]
    fits = type(value) is wanted or (wanted is float and type(value) is int)
    if not fits:
        return f"must be {spec.type}, not {type(value).__name__}"
    if isinstance(value, str):
        if spec.choices and value not in spec.choices:
            return f"must be one of {', '.join(spec.choices)}"
        return f"is longer than {MAX_TEXT} characters" if len(value) > MAX_TEXT else ""
    if not math.isfinite(value):
        return "must be a finite number"
    if spec.minimum is not None and value < spec.minimum:
        return f"must be at least {spec.minimum:g} {spec.unit}".rstrip()
    if spec.maximum is not None and value > spec.maximum:
        return f"must be at most {spec.maximum:g} {spec.unit}".rstrip()
    return ""
