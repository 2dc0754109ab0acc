"""What a playbook asks of faults, against the catalogue: kinds, parameters, targets. Without a cluster."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from agents.api.faultspecs import SPECS, Spec
from ftctl.playbook.schema import Fault, Playbook

Where = tuple[str | int, ...]


def problems(playbook: Playbook) -> Iterator[tuple[Where, str]]:
    """Each with its place in the file."""
    for part in ("method", "cleanup"):
        for index, action in enumerate(getattr(playbook, part)):
            for where, fault in _faults((part, index), action):
                yield from ((where + more, text) for more, text in _of_fault(fault))
                if why := _protected(fault, playbook):
                    yield (*where, "target"), why


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
