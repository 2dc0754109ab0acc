"""What a playbook asks of faults, against the catalogue: kinds, parameters, targets. Without a cluster."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from agents.api.faultspecs import SPECS, Spec
from ftctl.playbook.schema import Expect, Fault, Inject, Parallel, Playbook, Sleep

Where = tuple[str | int, ...]
MARGIN_S = 2.0  # an action takes a moment, too


def problems(playbook: Playbook) -> Iterator[tuple[Where, str]]:
    """Each with its place in the file."""
    for part in ("method", "cleanup"):
        for index, action in enumerate(getattr(playbook, part)):
            for where, fault in _faults((part, index), action):
                yield from ((where + more, text) for more, text in _of_fault(fault))
                if why := _protected(fault, playbook):
                    yield (*where, "target"), why
    yield from _conflicts(playbook)


def notes(playbook: Playbook) -> Iterator[tuple[Where, str]]:
    """What is allowed, and seldom meant."""
    for index, action in enumerate(playbook.method):
        if isinstance(action, Expect) and action.within == 0 and str(action.expect).startswith(("replica", "rails")):
            text = f"`expect: {action.expect}` is looked at once; `within: 5s` waits for what a busy machine shows late"
            yield ("method", index), text


def _conflicts(playbook: Playbook) -> Iterator[tuple[Where, str]]:
    """A link has one fault at a time: an agent refuses another one. Said only where it is sure: links by name or
    number, and nothing between but a sleep."""
    held: dict[str, tuple[str, float]] = {}  # link -> the fault there, and for how long it is surely there yet
    for index, action in enumerate(playbook.method):
        if isinstance(action, Sleep):
            held = {link: (kind, left - action.sleep) for link, (kind, left) in held.items()}
            continue
        if isinstance(action, Expect) and action.within == 0:
            continue
        group = action.parallel if isinstance(action, Parallel) else [action]
        faults = [one for one in group if isinstance(one, Inject) and one.at is None]
        if len(faults) < len(group):
            held = {}
            continue
        for place, one in enumerate(faults):
            link = _link(one)
            if not link:
                continue
            kind, left = held.get(link, ("", 0.0))
            if left > MARGIN_S:
                where = ("method", index, "parallel", place) if isinstance(action, Parallel) else ("method", index)
                yield where, f"{one.inject} would be refused: {kind} is in force on the same link ({link}) by then"
            held[link] = (one.inject, one.duration)


def _link(fault: Fault) -> str:
    """By what the file says; empty: it is found out at run time, or this is no fault of a link."""
    target, spec = fault.target, SPECS.get(fault.inject)
    owner = target.node or target.replica
    if spec is None or spec.target != "nic" or owner in (None, "any") or target.rail in ("active", "any"):
        return ""
    name = target.nic if target.nic is not None else f"rail {target.rail}"
    return f"{name} of {owner}"


def _faults(where: Where, action: Any) -> Iterator[tuple[Where, Fault]]:
    if isinstance(action, Fault):
        yield where, action
    for index, inner in enumerate(getattr(action, "parallel", ())):
        yield from _faults((*where, "parallel", index), inner)
    storm = getattr(action, "storm", None)
    for index, inner in enumerate(storm.mix if storm is not None else ()):
        yield (*where, "storm", "mix", index), inner


def _of_fault(fault: Fault) -> Iterator[tuple[Where, str]]:
    spec = SPECS.get(fault.inject)
    if spec is None:
        near = difflib.get_close_matches(fault.inject, SPECS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(SPECS)}"
        yield ("inject",), f"there is no fault {fault.inject} ({meant})"
        return
    if wrong := _target(fault, spec):
        yield ("target",), wrong
    params = {param.name: param for param in spec.params}
    for name, value in fault.params.items():
        if name not in params:
            yield ("with", name), f"{fault.inject} has no parameter {name} (it has: {', '.join(params) or 'none'})"
        elif wrong := params[name].problem(value):
            yield ("with", name), f"{name} of {fault.inject} {wrong}"
    for param in spec.params:
        if param.default is None and param.name not in fault.params:
            yield ("inject",), f"{fault.inject} needs `with: {{{param.name}: ...}}` ({param.help})"


def _protected(fault: Fault, playbook: Playbook) -> str:
    """As far as names say it; where a replica runs, the agents know."""
    rules, target = playbook.protect.of("this playbook"), fault.target
    nics = (target.nic,) if target.nic else ()
    replicas = (target.replica,) if target.replica and target.replica != "any" else ()
    node = target.node if target.node and target.node != "any" else ""
    return rules.why(node, nics, replicas)


def _target(fault: Fault, spec: Spec) -> str:
    target = fault.target
    if spec.target == "nic" and target.nic is None and target.rail is None:
        return f"{fault.inject} is aimed at a link: give nic or rail"
    if spec.target == "replica" and target.replica is None:
        return f"{fault.inject} is aimed at a replica: give replica"
    if spec.target != "nic" and (target.nic is not None or target.rail is not None):
        return f"{fault.inject} is not aimed at a link"
    if target.node is None and target.replica is None and spec.target != "coordinator":
        return f"{fault.inject}: where? give node or replica"
    return ""
