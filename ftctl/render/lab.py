"""The labs of this machine, for people and for programs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ftctl import durations
from ftctl.lab.manifest import KeeperState, ManifestError, load
from ftctl.lab.registry import LabInfo
from ftctl.lab.traffic import Traffic, reports
from ftctl.render.document import Document
from ftctl.render.tables import BAD, GOOD, PASSING, Cell, table

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable


def keeper_of(lab: LabInfo) -> KeeperState | None:
    with suppress(ManifestError):
        return load(lab.paths.keeper_state, KeeperState)
    return None


def state_of(lab: LabInfo) -> tuple[str, str]:
    """A word, and why."""
    if lab.manifest is None:
        return "damaged", lab.problem
    if not lab.alive:
        return "dead", "none of its processes lives; ftctl lab down removes its files"
    keeper = keeper_of(lab)
    if keeper is None or keeper.phase == "building":
        return "starting", "its network is being made"
    if not keeper_lives(lab, keeper):
        return "orphaned", "its keeper is dead, so nothing is started again; ftctl lab down removes it"
    if keeper.phase != "running":
        return keeper.phase, keeper.error
    waiting = [child.name for child in keeper.children if child.state == "waiting"]
    if waiting:
        return "degraded", f"{', '.join(waiting)} died and will be started again"
    ended = [f"{child.name} ({child.exit_code})" for child in keeper.children if child.state == "ended"]
    return "up", f"ended: {', '.join(ended)}" if ended else ""


def keeper_lives(lab: LabInfo, keeper: KeeperState) -> bool:
    from ftctl.lab.processes import carries

    return lab.manifest is not None and carries(keeper.pid, lab.manifest.uuid)


def tables(labs: list[LabInfo], now: float) -> list[ConsoleRenderable]:
    rows: list[list[Cell]] = []
    parts: list[ConsoleRenderable] = []
    from rich.text import Text

    for lab in labs:
        word, why = state_of(lab)
        style = {"up": GOOD, "starting": PASSING, "degraded": PASSING}.get(word, BAD)
        options = lab.manifest.options if lab.manifest else None
        rows.append(
            [
                lab.name,
                Text(word, style=style),
                str(options.replicas) if options else "?",
                str(options.rails) if options else "?",
                (options.rate or "-") if options else "?",
                durations.show(max(0.0, now - lab.manifest.created)) if lab.manifest else "?",
                why or str(lab.dir),
            ]
        )
    parts.append(table("labs", ["name", "state", "replicas", "rails", "rate", "age", "where"], rows))
    for lab in labs:
        keeper = keeper_of(lab)
        if lab.alive and keeper is not None:
            children: list[list[Cell]] = [
                [child.name, child.namespace, child.state, str(child.pid or "-"), str(child.restarts), child.log]
                for child in keeper.children
            ]
            heads = ["process", "namespace", "state", "pid", "restarts", "log"]
            if traffic := reports(lab.paths):
                parts.append(_traffic(lab.name, traffic))
            parts.append(table(f"processes of lab {lab.name} (keeper {keeper.pid})", heads, children))
    return parts


def _traffic(name: str, traffic: list[tuple[str, Traffic]]) -> ConsoleRenderable:
    from rich.text import Text

    heads = ["rank", "node", "state", "rounds", "messages", "bytes checked", "wrong", "slowest message", "pid"]
    rows: list[list[Cell]] = [
        [
            str(one.rank),
            node,
            one.state,
            str(one.rounds),
            str(one.messages_checked),
            str(one.bytes_checked),
            Text(str(one.bytes_wrong), style=BAD if one.bytes_wrong else GOOD),
            f"{one.longest_ms:.0f} ms",
            str(one.pid),
        ]
        for node, one in traffic
    ]
    return table(f"bytes through the NCCL plugin in lab {name}", heads, rows)


def document(labs: list[LabInfo]) -> Document:
    return {"schema": 1, "labs": [_one(lab) for lab in labs]}


def _one(lab: LabInfo) -> Document:
    word, why = state_of(lab)
    keeper = keeper_of(lab)
    options = lab.manifest.options if lab.manifest else None
    return {
        "name": lab.name,
        "state": word,
        "reason": why,
        "dir": str(lab.dir),
        "inventory": str(lab.inventory),
        "created": lab.manifest.created if lab.manifest else None,
        "replicas": options.replicas if options else None,
        "rails": options.rails if options else None,
        "rate": options.rate if options else None,
        "step_ms": options.step_ms if options else None,
        "job": options.job if options else None,
        "traffic": [{"node": node, **msgspec.structs.asdict(one)} for node, one in reports(lab.paths)],
        "keeper": keeper.pid if keeper else None,
        "processes": [
            {
                "name": child.name,
                "namespace": child.namespace,
                "state": child.state,
                "pid": child.pid or None,
                "restarts": child.restarts,
                "exit_code": child.exit_code,
                "log": child.log,
            }
            for child in (keeper.children if keeper else ())
        ],
    }
