"""What is wrong on this node, why, and what to do about it. Pure: views in, problems out, worst first."""

from __future__ import annotations

import shlex

from agents.api.models import FaultView, ProblemView, ProcessView, Verdict
from agents.api.words import Action, FaultState, Health
from agents.health.desk import short
from agents.health.views import said
from agents.injection.ledger import Damaged

SUGGESTED = {
    Action.NONE: "",
    Action.WATCH: "ftctl health {node} --explain",
    Action.CHECK: "ftctl health {node} --explain",
    Action.RESTART: "ftctl health {node} --explain   # restart the replica on it",
    Action.DRAIN: "ftctl drain node {node} --reason {thing}",
    Action.RESET_IDLE: "ftctl drain node {node} --reason {thing}   # then reset {thing}",
    Action.EVICT: "ftctl drain node {node} --reason {thing}   # then reset or repair {thing}",
    Action.EVICT_NODE: "ftctl drain node {node} --reason {thing}   # then restart the node",
}
SICK = (Health.DEGRADED, Health.UNHEALTHY)


def of_ledger(node: str, damaged: tuple[Damaged, ...]) -> list[ProblemView]:
    return [
        ProblemView(
            object=node,
            reason=f"ledger entry {one.path} cannot be read ({one.reason}): a fault may be in force",
            action=f"look at it, undo it by hand, then rm {one.path}",
            in_force=True,
        )
        for one in damaged
    ]


def of_helper(node: str, trouble: str) -> list[ProblemView]:
    reason = f"{trouble}; faults of rails and processes are refused, those in force end when their time is up"
    action = f"systemctl restart ft-agent-helper on {node}"
    return [ProblemView(object=node, reason=reason, action=action)] if trouble else []


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


def of_verdicts(verdicts: list[Verdict]) -> list[ProblemView]:
    """One an object: its worst verdict, if that is a bad one."""
    worst: dict[tuple[str, str], Verdict] = {}
    for verdict in verdicts:  # worst first
        worst.setdefault((verdict.kind, verdict.object), verdict)
    return [
        ProblemView(
            object=f"{one.node}/{short(one)}",
            reason=said(one),
            action=one.hint or SUGGESTED[one.action].format(node=one.node, thing=shlex.quote(short(one))),
        )
        for one in worst.values()
        if one.health in SICK
    ]


def advised(of_verdicts: list[ProblemView], wanted: list[ProblemView]) -> list[ProblemView]:
    """What the policy would do about an object, which names its verdict too, stands for the verdict's own problem."""
    spoken_of = {one.object for one in wanted}
    return [*(one for one in of_verdicts if one.object not in spoken_of), *wanted]


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
