"""Why a replica or a rail is in its state: pure, from one Snapshot, the links and the events.

An explanation is a list of findings, from the verdict down to its causes: what the coordinator decided, what the rank
and its process say, and what is wrong on the nodes it runs on. Each finding names who says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agents.api.models import EventRecord, LinkRow, NicView, ReplicaState
from ftctl import nearest
from ftctl.client import links
from ftctl.client.cluster import Snapshot
from ftctl.client.problems import Problem, Urgency, is_bad, rail_word
from ftctl.client.problems import find as find_problems
from ftctl.client.ranks import exit_word, rows
from ftctl.client.replicas import find
from ftctl.durations import show
from ftctl.errors import UsageProblem

EVENTS_SHOWN = 10


@dataclass(frozen=True)
class Finding:
    source: str  # coordinator, rank 0 on node1, agent of node1
    text: str


@dataclass(frozen=True)
class Explanation:
    """`action` is what to do next, possibly empty. `kind`: replica | rail | node | fault."""

    replica: str  # or the rail (NODE/NIC), the node, `fault ID`
    state: str
    summary: str
    findings: tuple[Finding, ...]
    events: tuple[EventRecord, ...]
    action: str
    kind: str = "replica"


def replica(snapshot: Snapshot, name: str, events: list[EventRecord]) -> Explanation:
    state = find(snapshot.job, name) if snapshot.job else None
    word = state.state if state else "unknown"
    stuck = word in ("hung", "suspect")
    summary = state.reason if state else ""
    if state is None:
        summary = (
            f"the coordinator cannot be asked: {snapshot.job_error}"
            if snapshot.job is None
            else "the coordinator does not know it (it has never joined)"
        )
    hosts = snapshot.hosts(name)
    problems = [
        p
        for p in find_problems(snapshot)
        if p.object == name
        or p.object.partition("/")[0] in hosts
        or p.object == "coordinator"
        or p.object.startswith("job ")
    ]
    own = next((p for p in problems if p.object == name and p.action), None)
    own = _stopped(snapshot, name, state) or own
    first = own or next((p for p in problems if p.action and not p.expected), None)
    about = [e for e in events if e.object == name or e.object.endswith(f"/{name}") or e.object.startswith(f"{name}.")]
    return Explanation(
        replica=name,
        state=word,
        summary=summary + (f"; {evidence}" if (evidence := _evidence(name, events)) and stuck else ""),
        findings=(
            *_of_coordinator(snapshot, name),
            *_of_ranks(snapshot, name),
            *(Finding(p.object, p.reason) for p in problems if p.object != name),
        ),
        events=tuple(about[-EVENTS_SHOWN:]),
        action=first.action if first else "",
    )


def _stopped(snapshot: Snapshot, name: str, state: ReplicaState | None) -> Problem | None:
    """A process of it is stopped by a signal, and the job feels it: that is the cause, and its cure is known."""
    if state is None or state.state not in ("hung", "suspect", "evicted", "unreachable"):
        return None
    for row in rows(snapshot):
        process = row.process
        if row.replica == name and process is not None and process.status == "stopped" and process.pid is not None:
            why = f"rank {row.rank} is stopped by a signal (state T)"
            return Problem(name, why, f"on {row.node}: kill -CONT {process.pid}", Urgency.REPLICA)
    return None


def _evidence(name: str, events: list[EventRecord]) -> str:
    """What was found out about its last hang, in the sentence that comes first."""
    found = [e for e in events if e.object == name and e.evidence]
    return found[-1].evidence.partition("\n")[0] if found else ""


def rail(snapshot: Snapshot, node: str, nic: str, rows: list[LinkRow], events: list[EventRecord]) -> Explanation:
    """What the links over a NIC do, and why. `rows`: those of this node. Raises UsageProblem for what is not there."""
    view = next((view for view in snapshot.views() if view.name == node), None)
    found = next((one for one in view.nics if one.name == nic), None) if view else None
    if view is None or found is None:
        rails = [one.name for one in view.nics if one.role == "rail"] if view else []
        have = nearest.among(nic, rails) if rails else "no rails declared" if view else "its agent does not answer"
        raise UsageProblem(f"rail {node}/{nic}", f"unknown ({have})", "ftctl status")
    name = f"{node}/{nic}"
    total = links.over(view, found)
    known = links.peers(snapshot)
    problems = find_problems(snapshot)
    own = next((p for p in problems if p.object == name), None)
    about = [e for e in events if e.object == name]
    return Explanation(
        replica=name,
        state=rail_word(found) if is_bad(found) else total.state or "unused",
        summary=_rail_in_words(found, total),
        findings=(
            Finding(
                f"agent of {node}",
                f"{nic} is {rail_word(found)}"
                + (f": {found.reason}" if found.reason not in ("", rail_word(found)) else ""),
            ),
            *(_of_row(node, row, known, snapshot) for row in rows if (row.device or row.rail) == nic),
            *(Finding(p.object, p.reason) for p in problems if p.object == name),
        ),
        events=tuple(about[-EVENTS_SHOWN:]),
        action=(own.action or _far_action(rows, nic, known, snapshot)) if own else "",
        kind="rail",
    )


def _far_action(rows: list[LinkRow], nic: str, known: dict[str, str], snapshot: Snapshot) -> str:
    """Where to look on: at the other end of this rail's links, if its NIC is down; else nothing."""
    ends = (known.get(row.address, "") for row in rows if (row.device or row.rail) == nic and row.state != "UP")
    return next((f"ftctl why rail {end}" for end in ends if _is_down(end, snapshot)), "")


def _is_down(rail: str, snapshot: Snapshot) -> NicView | None:
    """The NIC of `rail`, NODE/NIC, if it is not well."""
    found = (nic for view in snapshot.views() for nic in view.nics if f"{view.name}/{nic.name}" == rail)
    return next(filter(is_bad, found), None)


def _rail_in_words(nic: NicView, total: links.RailLinks) -> str:
    if not total.links:
        return "no process on this node has links over it"
    if total.active and total.up:
        return f"it carries the data of {total.active} of {total.links} link ends"
    if total.moved:
        return f"it carries nothing: {links.sentence(total)}"
    if total.state == "UP":
        return f"it carries heartbeats only: it is the backup of {total.links} link ends"
    return f"it carries nothing: {total.reason or nic.reason}"


def _of_row(node: str, row: LinkRow, known: dict[str, str], snapshot: Snapshot) -> Finding:
    name = f" {row.name}" if row.kind == "ring" else f" rank {row.rank}" if row.rank else ""
    far = known.get(row.address, "")
    direction = "to" if row.direction == "out" else "from"
    text = f"{row.up} of {row.links} links {direction} {far or row.address or row.peer} UP"
    if row.state != "UP":
        text += f"; {row.state} for {show(row.since_s)}: {row.reason}"
    if row.hold_left_s > 0:
        text += f", {show(row.hold_left_s)} left"
    if row.active:
        text += f"; carries {row.active}"
    text += f"; lost {row.flaps} times lately" if row.flaps > 1 else "; lost once lately" if row.flaps else ""
    text += f"; {row.resumes} resume{'s' if row.resumes > 1 else ''}" if row.resumes else ""
    if other := _is_down(far, snapshot):
        text += f"; the NIC at the other end is {rail_word(other)}"
    return Finding(f"process {row.pid} ({row.kind}{name}) on {node}", text)


def _of_coordinator(snapshot: Snapshot, name: str) -> Iterator[Finding]:
    state = find(snapshot.job, name) if snapshot.job else None
    if snapshot.job is None or state is None:
        return
    beat = f", last heartbeat {state.heartbeat_age_ms:.0f} ms ago" if state.heartbeat_age_ms is not None else ""
    phase = f", phase {state.phase.lower()}" if state.phase else ""
    yield Finding(
        "coordinator",
        f"{state.state} for {show(max(0.0, snapshot.time - state.since))}, incarnation {state.incarnation},"
        f" slot {state.slot}, step {state.step} (the job is at {snapshot.job.step}){phase}{beat}",
    )
    if state.pace is not None and state.compute_ms is not None and state.wait_ms is not None:
        yield Finding(
            "coordinator",
            f"computes {state.compute_ms:.0f} ms a step ({state.pace:.1f} x the median of the others) and waits"
            f" {state.wait_ms:.0f} ms" + (": a straggler, the others wait for it" if state.straggler else ""),
        )
    for stall in snapshot.job.stalls[-3:]:
        if stall.replica == name:
            cost = f", others stalled {stall.stall_ms:.0f} ms" if stall.stall_ms is not None else ""
            yield Finding("coordinator", f"{stall.kind} at step {stall.step}: {stall.reason}{cost}")


def _of_ranks(snapshot: Snapshot, name: str) -> Iterator[Finding]:
    for row in rows(snapshot):
        if row.replica != name:
            continue
        process, report = row.process, row.report
        if process is not None:
            parts = [f"rank {row.rank} is {process.state}" + (f", pid {process.pid}" if process.pid else "")]
            if process.status == "stopped":
                parts.append("stopped by a signal (SIGSTOP)")
            if process.exit_code is not None:
                parts.append(f"last ended with {exit_word(process.exit_code)}")
            if process.restarts:
                parts.append(f"started again {process.restarts} times")
            if process.next_start_s is not None:
                parts.append(f"starts again in {show(max(0.0, process.next_start_s))}")
            if process.reason:
                parts.append(process.reason)
            if process.log:
                parts.append(f"log {process.log}")
            yield Finding(f"agent of {row.node}", "; ".join(parts))
        if report is not None:
            yield Finding(
                f"rank {row.rank} on {row.node}",
                f"{report.state} at step {report.step}, epoch {report.term}.{report.epoch},"
                f" reported {show(report.silent_s)} ago",
            )
            for link in report.links:
                if link.state != "UP":
                    yield Finding(
                        f"rank {row.rank} on {row.node}", f"{link.rail} to {link.peer} is {link.state}: {link.reason}"
                    )
