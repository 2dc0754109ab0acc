"""What became of an injection, on every node that was asked."""

from __future__ import annotations

from agents.api.models import FaultView
from ftctl.app import report
from ftctl.client.cluster import Cluster
from ftctl.client.injection import Outcome, in_doubt, still_there
from ftctl.durations import show as duration
from ftctl.hostlist import fold
from ftctl.render import document, tables
from ftctl.render.status import fault_table


def show(cluster: Cluster, outcome: Outcome) -> None:
    world, dry_run = cluster.world, outcome.dry_run
    faults = list(outcome.faults.values())
    doubts = [in_doubt(node, request) for node, request in outcome.unknown.items()]
    doubts += [*outcome.stuck, *(still_there(fault) for fault in outcome.troubled())]
    errors = [error for node, error in outcome.errors.items() if node not in outcome.unknown] + doubts
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "dry_run": dry_run,
            "outcome": outcome.word,
            "nodes": {node: _fate(outcome, node) for node in (*outcome.faults, *outcome.taken_back, *outcome.errors)},
            "faults": [document.fault(f) for f in faults],
            "taken_back": [document.fault(f) for f in outcome.taken_back.values()],
            "errors": [str(error) for error in errors],
        }
        document.emit(world, cluster.output, whole)
    elif faults and not dry_run:
        tables.show(world.console(), fault_table(faults))
    if dry_run:
        for fault in faults:
            world.say(_would(fault))
    elif to_revert := [fault.id for fault in faults if not fault.state.over]:
        world.say(f"take it back earlier with: ftctl revert {' '.join(to_revert)}")
    for fault in faults:
        if fault.warning:
            world.say(f"warning: {fault.target}: {fault.warning}")
    for error in errors:
        report(world, error)
    if outcome.word == "partial":
        world.say(f"partial: {_partial(outcome)}")


def _fate(outcome: Outcome, node: str) -> str:
    if node in outcome.unknown:
        return "unknown"
    if node in outcome.errors:
        return "not injected"
    return "taken back" if node in outcome.taken_back else "dry run" if outcome.dry_run else "injected"


def _partial(outcome: Outcome) -> str:
    would = "would be injected" if outcome.dry_run else "injected"
    parts = [f"{would} on {fold(outcome.faults)}"] if outcome.faults else []
    parts += [f"injected and taken back on {fold(outcome.taken_back)}"] if outcome.taken_back else []
    parts += [f"not on {fold(outcome.errors)}"]
    done = [fault.id for fault in outcome.faults.values() if fault.irreversible]
    left = [fault.id for fault in outcome.faults.values() if not fault.irreversible and not outcome.dry_run]
    parts += [f"cannot be taken back: {', '.join(done)}"] if done and not outcome.dry_run else []
    parts += [f"ftctl revert {' '.join(left)} takes it back"] if left else []
    return "; ".join(parts)


def _would(fault: FaultView) -> str:
    undo = f"; undo: {'; '.join(fault.undo)}" if fault.undo else ""
    time = " (it cannot be taken back)" if fault.irreversible else f" for {duration(fault.duration_s)}{undo}"
    return f"dry run: {fault.kind} on {fault.target} would be injected{time}"
