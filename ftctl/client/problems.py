"""What is wrong with the cluster, why, and what to do about it: pure, from one Snapshot.

A problem is *expected* when somebody brought it about (a rail down by an injected fault, a replica drained) or when it
is on its way out (a replica catching up). Expected ones are shown, but a cluster with nothing else is healthy:
otherwise every chaos run and every rejoin would page the person on call, who would soon stop looking.

The list is ordered by what needs hands first; `recommend` is its first entry that has an action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from agents.api.models import FaultState, FaultView, Health, JobState, NicView, NodeView, ReplicaState
from ftctl.client import links
from ftctl.client.cluster import Snapshot
from ftctl.durations import show
from ftctl.errors import AgentUnreachable
from ftctl.exit_codes import ExitCode, most_urgent


class Urgency(IntEnum):
    """In the order of the list: what blocks or endangers more comes first."""

    STUCK_FAULT = 0
    COORDINATOR = 1
    JOB = 2
    AGENT = 3
    REPLICA = 4
    HARDWARE = 5
    EXPECTED = 6


@dataclass(frozen=True)
class Problem:
    """`object` as in r1, node1/rail0, job main; `action` is a command or a step, possibly empty."""

    object: str
    reason: str
    action: str
    urgency: Urgency
    code: ExitCode = ExitCode.FAILED

    @property
    def expected(self) -> bool:
        return self.urgency is Urgency.EXPECTED


def find(snapshot: Snapshot) -> list[Problem]:
    """All problems, most urgent first, one for each object."""
    every: list[Problem] = []
    for node in snapshot.nodes:
        if node.error is not None:
            lost = isinstance(node.error, AgentUnreachable)
            every.append(
                Problem(
                    node.name,
                    f"its agent: {node.error.reason}" if lost else str(node.error),
                    node.error.hint,
                    Urgency.AGENT,
                    ExitCode.UNREACHABLE if lost else node.error.code,
                )
            )
    every += _of_coordinator(snapshot)
    every += _of_halts(snapshot)
    for view in snapshot.views():
        every += _of_cordon(snapshot, view)
        every += _of_faults(view)
        every += _of_rails(view)
        every += _of_links(snapshot, view)
        every += _of_gpus(view)
    if snapshot.job is not None:
        every += _of_job(snapshot.job)
        if snapshot.job.state != "finished":
            every += [problem for replica in snapshot.job.replicas for problem in _of_replica(snapshot, replica)]
    # What the agents themselves judged fills in for objects that nothing above speaks of.
    spoken_of = {problem.object for problem in every}
    for view in snapshot.views():
        for found in view.problems:
            if found.in_force or (found.object not in spoken_of and f"{view.name}/{found.object}" not in spoken_of):
                how = (
                    (Urgency.STUCK_FAULT, ExitCode.IN_FORCE) if found.in_force else (Urgency.HARDWARE, ExitCode.FAILED)
                )
                every.append(Problem(found.object, found.reason, found.action, *how))
    first: dict[str, Problem] = {}
    for problem in sorted(every, key=lambda problem: problem.urgency):
        first.setdefault(problem.object, problem)
    return list(first.values())


def recommend(problems: list[Problem]) -> Problem | None:
    """The first problem that something can be done about. Several injected faults are one thing to do."""
    first = next((problem for problem in problems if problem.action), None)
    if first is None or not first.expected:
        return first
    reverts = {p.action: p.object for p in problems if p.expected and p.action.startswith("ftctl revert ")}
    if len(reverts) < 2 or first.action not in reverts:
        return first
    return replace(first, object=", ".join(reverts.values()), action="ftctl revert --all")


def verdict(problems: list[Problem]) -> ExitCode:
    """OK when nothing but expected problems is left."""
    return most_urgent(problem.code for problem in problems if not problem.expected)


def _of_coordinator(snapshot: Snapshot) -> Iterator[Problem]:
    error = snapshot.job_error
    # Where no agent answers at all, the nodes' own rows say so already.
    if error is None or (isinstance(error, AgentUnreachable) and not snapshot.views()) or snapshot.finished():
        return
    if snapshot.needs_no_coordinator():
        return
    # Agents that answer for themselves but not about the job wait for a coordinator that hangs.
    hangs = isinstance(error, AgentUnreachable)
    yield Problem(
        "coordinator",
        f"job {snapshot.job_name} cannot be asked: {'it does not answer; ' if hangs else ''}{error.reason}",
        "ftctl coordinator status" if hangs or not error.hint else error.hint,
        Urgency.COORDINATOR,
    )


def _of_job(job: JobState) -> Iterator[Problem]:
    thing = f"job {job.name}"
    have = len(job.contributors)
    if job.state == "stopped":
        yield Problem(
            thing, f"stopped: {job.reason}", f"ftctl events --since 10m   # why job {job.name} stopped", Urgency.JOB
        )
    elif job.state == "starting":
        seen = sum(1 for replica in job.replicas if replica.state not in ("drained", "evicted", "unreachable"))
        yield Problem(
            thing,
            job.reason or f"starting: {seen} of {job.replicas_wanted} replicas are there",
            "",
            Urgency.EXPECTED,
        )
    elif job.state == "holding" or (job.state != "finished" and have < job.min_replicas):
        reason = job.reason or f"{have} contributors, at least {job.min_replicas} are needed"
        if "unattributed" in reason:
            yield Problem(thing, f"holds: {reason}", "ftctl evict replica R   # the one you do not trust", Urgency.JOB)
            return
        waiting = next((r for r in job.replicas if r.state in ("drained", "evicted", "unreachable")), None)
        yield Problem(thing, f"holds: {reason}", _action(job, waiting) if waiting else "", Urgency.JOB)
    elif job.state == "recovering":
        yield Problem(thing, f"recovering: {job.reason}" if job.reason else "recovering", "", Urgency.EXPECTED)
    elif job.state == "running" and _lacks_spares(job):
        ready = sum(replica.state == "spare" for replica in job.replicas)
        yield Problem(
            thing,
            f"{ready} of {job.spares_wanted} hot spares are ready: with the next losses fewer will contribute",
            "start as many replicas more, under names of their own",
            Urgency.REPLICA,
        )
    elif job.state == "running" and job.reason:  # it trains, but the next loss will find the coordinator unable to act
        yield Problem(thing, job.reason, f"ftctl events --since 10m   # since when, on job {job.name}", Urgency.JOB)


def _lacks_spares(job: JobState) -> bool:
    """Nobody has ever been started for them: what is only away has a problem, or a way back, of its own."""
    return len(job.replicas) < job.replicas_wanted + job.spares_wanted


# state -> (urgency, what to do). The words are those of ARCHITECTURE.md; a state that is not here is unknown to this
# version and is shown as it is.
_REPLICA_STATES: dict[str, tuple[Urgency, str]] = {
    "starting": (Urgency.EXPECTED, "ftctl wait replica {r} --for contributing"),
    "fetching": (Urgency.EXPECTED, "ftctl wait replica {r} --for contributing"),
    "replaying": (Urgency.EXPECTED, "ftctl wait replica {r} --for contributing"),
    "draining": (Urgency.EXPECTED, "ftctl wait replica {r} --for drained"),
    "drained": (Urgency.EXPECTED, "ftctl rejoin replica {r}"),
    "suspect": (Urgency.REPLICA, "ftctl why replica {r}"),
    "hung": (Urgency.REPLICA, "ftctl dump replica {r} --stacks   # then: ftctl evict replica {r} --reason hung"),
    "evicted": (Urgency.REPLICA, "ftctl rejoin replica {r}"),
    "blocked": (Urgency.REPLICA, "ftctl why replica {r}"),
    "unreachable": (Urgency.REPLICA, "ftctl why replica {r}"),
}
_GOOD = frozenset({"contributing", "spare"})


def _action(job: JobState, replica: ReplicaState) -> str:
    action = _REPLICA_STATES.get(replica.state, (Urgency.REPLICA, "ftctl why replica {r}"))[1].format(r=replica.name)
    return action.replace("--for contributing", f"--for {way_in(job)}")


def way_in(job: JobState) -> str:
    """What a replica that comes now ends up as."""
    return "spare" if len(job.contributors) >= job.replicas_wanted else "contributing"


def _of_replica(snapshot: Snapshot, replica: ReplicaState) -> Iterator[Problem]:
    if replica.diverged:
        action = f'ftctl evict replica {replica.name} --reason "its results differ"'
        yield Problem(replica.name, f"diverged: {replica.diverged}", action, Urgency.REPLICA)
    if replica.state in _GOOD or snapshot.job is None:
        return
    urgency, _ = _REPLICA_STATES.get(replica.state, (Urgency.REPLICA, ""))
    reason = f"{replica.state} for {show(max(0.0, snapshot.time - replica.since))}"
    if replica.reason:
        reason += f": {replica.reason}"
    action = _action(snapshot.job, replica)
    there = [view for view in snapshot.views() if view.name in snapshot.supervisors(replica.name)]
    dead = next(filter(None, map(_dead_gpu, there)), None)
    if dead and replica.state in ("drained", "evicted"):
        yield Problem(replica.name, f"{reason}; {dead.object} is unhealthy", dead.action, urgency)
        return
    apart = [view.name for view in there if view.cordon]
    if apart and replica.state in ("drained", "evicted", "unreachable", "starting"):
        back = "" if replica.state == "starting" else f"   # then: ftctl rejoin replica {replica.name}"
        on = f"{reason}; {apart[0]} is cordoned"
        yield Problem(replica.name, on, f"ftctl uncordon node {apart[0]}{back}", Urgency.EXPECTED)
        return
    if replica.state in ("evicted", "unreachable", "starting"):
        for process in (p for view in snapshot.views() for p in view.processes if p.replica == replica.name):
            if process.state in ("backoff", "starting", "running"):
                # It is coming back by itself; a command would only get in the way.
                urgency, action = Urgency.EXPECTED, f"ftctl wait replica {replica.name} --for {way_in(snapshot.job)}"
            elif process.state == "failed":
                urgency, action = Urgency.REPLICA, f"ftctl ranks {replica.name}   # its log says why it ended"
                reason += f"; its process does not stay up ({process.reason or f'exit code {process.exit_code}'})"
    yield Problem(replica.name, reason, action, urgency)


def _of_cordon(snapshot: Snapshot, view: NodeView) -> Iterator[Problem]:
    if view.cordon is not None:
        ago = show(max(0.0, snapshot.time - view.cordon.since))
        reason = f"cordoned by {view.cordon.by} {ago} ago: {view.cordon.reason}; no replica is started on it"
        first = _dead_gpu(view)
        action = first.action if first else f"ftctl uncordon node {view.name}"
        yield Problem(view.name, reason, action, Urgency.EXPECTED)


def _of_halts(snapshot: Snapshot) -> Iterator[Problem]:
    """One line for all nodes that were halted for the same reason: usually it is all of them."""
    where: dict[tuple[str, str], list[NodeView]] = {}
    for view in snapshot.views():
        if view.halt is not None:
            where.setdefault((view.halt.by, view.halt.reason), []).append(view)
    for (by, reason), views in where.items():
        ago = show(max(0.0, snapshot.time - min(v.halt.since for v in views if v.halt is not None)))
        names = [view.name for view in views]
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        on = f"all {len(names)} nodes" if len(names) == len(snapshot.nodes) else some
        text = f"halted by {by} {ago} ago on {on}: {reason}; none is injected"
        yield Problem("faults", text, "ftctl faults allow --reason TEXT", Urgency.EXPECTED)


def _of_faults(view: NodeView) -> Iterator[Problem]:
    for fault in view.faults:
        if fault.state is FaultState.STUCK:
            by_hand = f"   # or by hand on {view.name}: {'; '.join(fault.undo)}" if fault.undo else ""
            yield Problem(
                f"fault {fault.id}",
                f"{fault.kind} on {fault.target} could not be taken back: {fault.detail or 'no reason given'}",
                f"ftctl revert {fault.id}{by_hand}",
                Urgency.STUCK_FAULT,
                ExitCode.IN_FORCE,
            )


def _of_rails(view: NodeView) -> Iterator[Problem]:
    for nic in view.nics:
        if nic.role != "rail" or not is_bad(nic):
            continue
        name = f"{view.name}/{nic.name}"
        fault = fault_on(view.faults, name)
        if fault is not None:
            left = "" if fault.irreversible else f", {show(max(0.0, fault.ttl_left_s))} left"
            yield Problem(
                name,
                f"{rail_word(nic)}: injected by {fault.owner} ({fault.kind} {fault.id}{left})",
                f"ftctl revert {fault.id}",
                Urgency.EXPECTED,
            )
        elif nic.injected:
            yield Problem(name, f"{rail_word(nic)}: injected", "ftctl faults", Urgency.EXPECTED)
        else:
            said = next((p for p in view.problems if p.object in (name, nic.name)), None)
            reason = said.reason if said else nic.reason
            yield Problem(
                name,
                f"{rail_word(nic)}: {reason}" if reason else rail_word(nic),
                said.action if said and said.action else _rail_action(view.name, nic),
                Urgency.HARDWARE,
            )


LINKS_CONNECT_S = 2.0  # a link that has just been made may still be connecting
SILENT_S = 3.0  # a process is asked once a second


def _of_links(snapshot: Snapshot, view: NodeView) -> Iterator[Problem]:
    """Rails that carry nothing although their NIC is well, and processes that say nothing."""
    for nic in view.nics:
        found = links.over(view, nic)
        if nic.role != "rail" or is_bad(nic) or not found.links:
            continue
        name = f"{view.name}/{nic.name}"
        if found.state in ("DOWN", "SILENT", "PROBING") and found.since_s >= LINKS_CONNECT_S:
            lost = found.links - found.up
            reason = f"{lost} of {found.links} links do not get through, though the NIC is up: {found.reason}"
            if other := _far_end(snapshot, nic):  # what is to be done stands beside the NIC that is down
                yield Problem(name, f"{reason}; {other} is down on purpose", "", Urgency.EXPECTED)
            else:
                yield Problem(name, reason, f"ftctl why rail {name}", Urgency.HARDWARE)
        elif found.hold_left_s > 0:
            left = f"{show(found.hold_left_s)} of hold-down left"
            flaps = f" after {found.flaps} losses" if found.flaps > 1 else ""
            yield Problem(name, f"works again, {left}{flaps}", "", Urgency.EXPECTED)
    for process in links.of_plugin(view):
        if process.note and (process.silent_s >= SILENT_S or not process.kind):
            yield Problem(
                f"{view.name}/pid {process.pid}",
                f"its links cannot be seen: {process.note}",
                f"on {view.name}: ps -o pid,stat,args {process.pid}   # T: stopped; kill -CONT {process.pid}",
                Urgency.REPLICA,
            )


def _far_end(snapshot: Snapshot, nic: NicView) -> str:
    """The NIC of this rail that is down on purpose, on whatever node: the far end of these links, as far as one can
    tell from here. Empty: there is none."""
    for view in snapshot.views():
        for other in view.nics:
            name = f"{view.name}/{other.name}"
            if other.name == nic.name and is_bad(other) and (other.injected or fault_on(view.faults, name)):
                return name
    return ""


def _of_gpus(view: NodeView) -> Iterator[Problem]:
    for gpu in view.gpus.devices:
        if gpu.state not in (Health.DEGRADED, Health.UNHEALTHY):
            continue
        name = f"{view.name}/gpu{gpu.index}"
        fault = fault_on(view.faults, name)
        said = next((p for p in view.problems if p.object == name), None)
        reason = f"{gpu.title}: {said.reason if said else gpu.reason}"
        if fault is not None:
            yield Problem(name, reason, f"ftctl revert {fault.id}", Urgency.EXPECTED)
        else:
            action = said.action if said and said.action else "ftctl health --explain"
            yield Problem(name, reason, action, Urgency.HARDWARE)


def _dead_gpu(view: NodeView) -> Problem | None:
    """Why nothing should be let in on this node yet, and what to do about that first."""
    dead = {f"{view.name}/gpu{gpu.index}" for gpu in view.gpus.devices if gpu.state is Health.UNHEALTHY}
    return next((problem for problem in _of_gpus(view) if problem.object in dead), None)


def fault_on(faults: list[FaultView], target: str) -> FaultView | None:
    """The fault that is (or may be) in force on this target."""
    return next((f for f in faults if f.target == target and not f.state.over), None)


def is_bad(nic: NicView) -> bool:
    return not (nic.present and nic.up and nic.carrier) or nic.state in (Health.DEGRADED, Health.UNHEALTHY)


def rail_word(nic: NicView) -> str:
    """The state of a rail in one word."""
    if not nic.present:
        return "missing"
    if not nic.up:
        return "down"
    if not nic.carrier:
        return "no carrier"
    return "degraded" if nic.state in (Health.DEGRADED, Health.UNHEALTHY) else "up"


def _rail_action(node: str, nic: NicView) -> str:
    if not nic.present:
        return f"look for {nic.name} on {node}: it was declared as a rail and is not there"
    if not nic.up:
        return f"on {node}: ip link set {nic.name} up"
    if not nic.carrier:
        return f"check cable, optic and switch port of {node}/{nic.name}"
    return f"look at the counters of {node}/{nic.name}: ftctl status -o wide"
