"""Waits until a new lab does its job, or says who does not, and why: every agent answers, and every replica contributes
or is a spare, as it was wished; or, for a job that runs NCCL's plugin, all links of all ranks are up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agents.api.models import ProcessView
from ftctl import durations
from ftctl.client.cluster import Agents, Snapshot
from ftctl.config import Flags, load
from ftctl.context import World
from ftctl.errors import CliError
from ftctl.lab.layout import NCCL
from ftctl.lab.lifecycle import Lab
from ftctl.lab.manifest import ChildState
from ftctl.lab.paths import tail

# Importing torch for every replica at once is what takes the time: some 10 s on two idle cores, more on busy ones.
READY_WITHIN_S = 180.0
POLL_S = 0.3
TIMEOUT_S = 3.0
TAIL_LINES = 15
HOPELESS_RESTARTS = 4  # none of a new lab's processes has a reason to die even once


def connect(world: World, lab: Lab) -> Agents:
    """The lab's agents, by its own inventory alone: what is configured for other clusters does not matter here."""
    own = replace(
        world, environ={}, cwd=lab.paths.root, user_config=lambda: lab.paths.root / "none.yaml", running_labs=list
    )
    return Agents(own, load(own, Flags(inventory=lab.paths.inventory)).inventory, TIMEOUT_S)


async def wait_until_training(
    world: World, lab: Lab, progress: Callable[[str], None], within_s: float = READY_WITHIN_S
) -> None:
    """Raises CliError with the end of the log of whatever stands in the way."""
    deadline = world.monotonic() + within_s
    async with connect(world, lab) as agents:
        while True:
            snapshot = await agents.snapshot()
            if trains(lab, snapshot):
                return
            _raise_if_hopeless(lab, snapshot)
            if world.monotonic() > deadline:
                raise _late(lab, snapshot, within_s)
            progress(describe(lab, snapshot))
            await asyncio.sleep(POLL_S)


def trains(lab: Lab, snapshot: Snapshot) -> bool:
    """It does its job."""
    if lab.manifest.options.job == NCCL:
        return len(linked(lab, snapshot)) == len(lab.nodes)
    if len(snapshot.views()) < len(lab.nodes) or snapshot.job is None:
        return False
    if snapshot.job.state == "finished":
        return True
    options, spares = lab.manifest.options, [r for r in snapshot.job.replicas if r.state == "spare"]
    return len(snapshot.job.contributors) == options.replicas and len(spares) == options.spares


def linked(lab: Lab, snapshot: Snapshot) -> list[str]:
    """Nodes whose rank has its links, all of them up; and those whose rank has done all its rounds already."""
    keeper = lab.keeper()
    done = [c.namespace for c in keeper.children if c.name.startswith("rank-") and c.state == "ended"] if keeper else []
    found = [
        view.name
        for view in snapshot.views()
        if any(
            process.kind == "nccl" and process.links and all(rail.up == rail.links for rail in process.rails)
            for process in view.link_processes
        )
    ]
    return [*found, *(node for node in done if node not in found)]


def describe(lab: Lab, snapshot: Snapshot) -> str:
    """How far it is, in one line."""
    wanted = len(lab.nodes)
    text = f"{len(snapshot.views())} of {wanted} agents answer"
    if lab.manifest.options.job == NCCL:
        return f"{text}, {len(linked(lab, snapshot))} of {wanted} ranks have their links"
    if snapshot.job is None:
        return text
    contributing = len(snapshot.job.contributors)
    others = [f"{r.name} {r.state}" for r in snapshot.job.replicas if r.state != "contributing"]
    waiting = f" ({', '.join(others)})" if others else ""
    return f"{text}, {contributing} of {lab.manifest.options.replicas} replicas contribute{waiting}"


def _raise_if_hopeless(lab: Lab, snapshot: Snapshot) -> None:
    """A process that stays down, or dies again and again, ends the wait at once."""
    keeper = lab.keeper()
    for child in keeper.children if keeper is not None else ():
        if (child.state == "ended" and child.exit_code != 0) or child.restarts >= HOPELESS_RESTARTS:
            raise _dead_process(lab, child)
    for process in _processes(snapshot):
        if process.state == "failed" or process.restarts >= HOPELESS_RESTARTS:
            how = "failed" if process.state == "failed" else f"died {process.restarts} times"
            # Seen between two deaths, it runs and has neither a reason nor an exit code: the log says more.
            code = "" if process.exit_code is None else f", the last time with exit code {process.exit_code}"
            why = f": {process.reason}" if process.reason else code
            raise CliError(f"replica {process.replica}", f"{how}{why}{_end_of(Path(process.log))}", "ftctl doctor")


def _dead_process(lab: Lab, child: ChildState) -> CliError:
    return CliError(
        f"lab {lab.name}",
        f"{child.name} ended with exit code {child.exit_code}{_end_of(Path(child.log))}",
        "ftctl doctor",
    )


def _late(lab: Lab, snapshot: Snapshot, within_s: float) -> CliError:
    """Name the first thing that is missing: an agent, then the coordinator, then a replica."""
    waited = f"not ready after {durations.show(within_s)}"
    for node in snapshot.nodes:
        if node.error is not None:
            log = lab.paths.log(f"agent-{node.name}")
            return CliError(f"lab {lab.name}", f"{waited}: {node.error}{_end_of(log)}", "ftctl doctor")
    if lab.manifest.options.job == NCCL:
        missing = [node.name for node in lab.nodes if node.name not in linked(lab, snapshot)]
        log = lab.paths.log(f"rank-{missing[0] if missing else lab.nodes[0].name}")
        reason = f"{waited}: the ranks of {', '.join(missing)} have no links"
        return CliError(f"lab {lab.name}", f"{reason}{_end_of(log)}", "ftctl doctor")
    if snapshot.job is None:
        log = lab.paths.log("coordinator")
        return CliError(f"lab {lab.name}", f"{waited}: {snapshot.job_error}{_end_of(log)}", "ftctl doctor")
    spares = {r.name for r in snapshot.job.replicas if r.state == "spare"}
    missing = sorted({node.replica for node in lab.nodes} - set(snapshot.job.contributors) - spares)
    process = next((p for p in _processes(snapshot) if p.replica in missing), None)
    end = _end_of(Path(process.log)) if process is not None and process.log else ""
    return CliError(f"lab {lab.name}", f"{waited}: {', '.join(missing)} did not contribute{end}", "ftctl doctor")


def _processes(snapshot: Snapshot) -> list[ProcessView]:
    return [process for view in snapshot.views() for process in view.processes]


def _end_of(log: Path) -> str:
    lines = tail(log, TAIL_LINES)
    return "".join(f"\n    {line}" for line in [f"the end of {log.name}:", *lines]) if lines else ""
