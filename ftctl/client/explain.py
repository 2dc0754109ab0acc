"""Why a replica is in its state: pure, from one Snapshot and the events.

An explanation is a list of findings, from the verdict down to its causes: what the coordinator decided, what the rank
and its process say, and what is wrong on the nodes it runs on. Each finding names who says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agents.api.models import EventRecord
from ftctl.client.cluster import Snapshot
from ftctl.client.problems import find as find_problems
from ftctl.client.ranks import exit_word, rows
from ftctl.client.replicas import find
from ftctl.durations import show

EVENTS_SHOWN = 10


@dataclass(frozen=True)
class Finding:
    source: str  # coordinator, rank 0 on node1, agent of node1
    text: str


@dataclass(frozen=True)
class Explanation:
    """`action` is what to do next, possibly empty."""

    replica: str
    state: str
    summary: str
    findings: tuple[Finding, ...]
    events: tuple[EventRecord, ...]
    action: str


def replica(snapshot: Snapshot, name: str, events: list[EventRecord]) -> Explanation:
    state = find(snapshot.job, name) if snapshot.job else None
    word = state.state if state else "unknown"
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
    first = own or next((p for p in problems if p.action and not p.expected), None)
    about = [e for e in events if e.object == name or e.object.endswith(f"/{name}") or e.object.startswith(f"{name}.")]
    return Explanation(
        replica=name,
        state=word,
        summary=summary,
        findings=(
            *_of_coordinator(snapshot, name),
            *_of_ranks(snapshot, name),
            *(Finding(p.object, p.reason) for p in problems if p.object != name),
        ),
        events=tuple(about[-EVENTS_SHOWN:]),
        action=first.action if first else "",
    )


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
