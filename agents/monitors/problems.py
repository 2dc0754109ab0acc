"""What is wrong on this node, why, and what to do about it. Pure: views in, problems out, worst first."""

from __future__ import annotations

from agents.api.models import FaultView, GpuView, NicView, ProblemView, ProcessView
from agents.api.words import FaultState, Health
from agents.injection.ledger import Damaged
from agents.monitors.nics import OTHER, Verdict

SICK = (Health.DEGRADED, Health.UNHEALTHY)


def of_ledger(node: str, damaged: tuple[Damaged, ...]) -> list[ProblemView]:
    return [
        ProblemView(
            object=node,
            reason=f"ledger entry {one.path} cannot be read ({one.reason}): a fault may be in force",
            action=f"look at it, undo it by hand, then rm {one.path}",
        )
        for one in damaged
    ]


def of_faults(faults: list[FaultView]) -> list[ProblemView]:
    return [
        ProblemView(
            object=fault.target,
            reason=f"fault {fault.id} is stuck: {fault.detail}",
            action=f"ftctl revert {fault.id}; by hand: {'; '.join(fault.undo)}",
        )
        for fault in faults
        if fault.state is FaultState.STUCK
    ]


def of_nics(node: str, nics: list[tuple[NicView, Verdict]]) -> list[ProblemView]:
    return [
        ProblemView(object=f"{node}/{view.name}", reason=verdict.reason, action=verdict.action)
        for view, verdict in nics
        if view.state in SICK and view.role != OTHER
    ]


def of_gpus(node: str, gpus: list[GpuView]) -> list[ProblemView]:
    return [
        ProblemView(
            object=f"{node}/gpu{gpu.index}",
            reason=gpu.reason,
            action="drain the node's replica, then look at the kernel log (dmesg, Xid) of the node",
        )
        for gpu in gpus
        if gpu.state in SICK
    ]


def of_processes(processes: list[ProcessView]) -> list[ProblemView]:
    problems = []
    for process in processes:
        name = f"{process.replica}/rank{process.rank}"
        log = f"see {process.log}" if process.log else "see its log"
        if process.state == "failed":
            action = f"{log}, then: ftctl rejoin replica {process.replica}"
            problems.append(ProblemView(object=name, reason=process.reason or "failed", action=action))
        elif process.state == "backoff" and process.restarts > 1:
            reason = process.reason or f"ended {process.restarts} times"
            problems.append(ProblemView(object=name, reason=reason, action=log))
        elif process.state == "running" and process.status == "stopped":
            reason = f"process {process.pid} is stopped (SIGSTOP)"
            problems.append(ProblemView(object=name, reason=reason, action=f"kill -CONT {process.pid}"))
    return problems
