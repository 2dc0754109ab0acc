"""Why a node or a fault is in its state: pure, from one Snapshot, what the agents know of faults, and the events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agents.api.models import EventRecord, FaultState, FaultView, NodeView
from ftctl import nearest
from ftctl.client import links
from ftctl.client.cluster import NodeAnswer, Snapshot
from ftctl.client.explain import EVENTS_SHOWN, Explanation, Finding
from ftctl.client.problems import Problem, is_bad, rail_word
from ftctl.client.problems import find as find_problems
from ftctl.client.replicas import find
from ftctl.durations import show
from ftctl.errors import AgentUnreachable, UsageProblem

AFTERMATH_S = 30.0  # so long after a fault its traces are still looked for


def node(snapshot: Snapshot, name: str, events: Sequence[EventRecord]) -> Explanation:
    """`name` is one of the inventory's."""
    answer = next(answer for answer in snapshot.nodes if answer.name == name)
    here = [p for p in find_problems(snapshot) if _is_here(p, name, snapshot)]
    own = [p for p in here if p.object == name or p.object.startswith(f"{name}/")]
    first = next((p for p in [*own, *here] if p.action and not p.expected), None)
    first = first or next((p for p in [*own, *here] if p.action), None)
    about = [e for e in events if e.object == name or e.object.startswith(f"{name}/")]
    return Explanation(
        replica=name,
        state=_word(answer, own),
        summary=_summary(answer, own),
        findings=(
            *(_of_view(answer.view) if answer.view is not None else ()),
            *_of_replicas(snapshot, name),
            *(Finding(p.object, p.reason) for p in here),
        ),
        events=tuple(about[-EVENTS_SHOWN:]),
        action=first.action if first else "",
        kind="node",
    )


def _is_here(problem: Problem, node: str, snapshot: Snapshot) -> bool:
    thing = problem.object
    fault = thing.removeprefix("fault ")
    if thing == node or thing.startswith(f"{node}/"):
        return True
    if any(f.id == fault and f.node == node for f in snapshot.faults()):
        return True
    return thing in snapshot.replica_names() and node in snapshot.hosts(thing)


def _word(answer: NodeAnswer, own: list[Problem]) -> str:
    if answer.view is None:
        return "unreachable" if isinstance(answer.error, AgentUnreachable) else "unknown"
    if answer.view.cordon is not None:
        return "cordoned"
    if any(not p.expected for p in own):
        return "degraded"
    return "disturbed on purpose" if own else "healthy"


def _summary(answer: NodeAnswer, own: list[Problem]) -> str:
    if answer.view is None:
        return answer.error.reason if answer.error is not None else "no answer"
    if answer.view.cordon is not None:
        return f"by {answer.view.cordon.by}: {answer.view.cordon.reason}"
    return "; ".join(f"{p.object}: {p.reason}" for p in own[:3])


def _of_view(view: NodeView) -> Iterator[Finding]:
    source = f"agent of {view.name}"
    running = f"version {view.agent.version}, up for {show(view.agent.age_s)}"
    yield Finding(source, running + ("" if view.agent.allow_faults else "; faults are not allowed here"))
    for nic in view.nics:
        if nic.role == "rail":
            said = links.sentence(links.over(view, nic))
            reason = f" ({nic.reason})" if is_bad(nic) and nic.reason else ""
            yield Finding(source, f"{nic.name} is {rail_word(nic)}{reason}" + (f": {said}" if said else ""))
    if not view.gpus.devices:
        yield Finding(source, view.gpus.note or "no GPUs")
    for gpu in view.gpus.devices:
        why = f": {gpu.reason}" if gpu.reason else ""
        yield Finding(source, f"gpu{gpu.index} {gpu.title} is {gpu.state.value}{why}")
    for process in view.processes:
        pid = f", pid {process.pid}" if process.pid else ""
        why = f": {process.reason}" if process.reason else ""
        yield Finding(source, f"{process.replica} rank {process.rank} is {process.state}{pid}{why}")
    for fault in view.faults:
        if not fault.state.over:
            yield Finding(source, f"fault {fault.id}: {_in_words(fault)}")


def _of_replicas(snapshot: Snapshot, node: str) -> Iterator[Finding]:
    for name in snapshot.replica_names():
        state = find(snapshot.job, name) if snapshot.job is not None else None
        if state is not None and node in snapshot.hosts(name):
            why = f": {state.reason}" if state.reason else ""
            yield Finding("coordinator", f"{name} is {state.state} at step {state.step}{why}")


def choose(faults: Sequence[FaultView], name: str) -> FaultView:
    """The fault of this id, or of the only id that begins so. Raises UsageProblem."""
    exact = [f for f in faults if f.id == name]
    found = exact or [f for f in faults if name and f.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(f.id for f in found[:5])
        raise UsageProblem(f"fault {name}", f"{len(found)} faults begin so: {some}", "ftctl faults --all")
    known = nearest.among(name, (f.id for f in faults))
    reason = f"no agent that answers knows it; reverted ones are forgotten after an hour ({known})"
    raise UsageProblem(f"fault {name}", reason, "ftctl faults --all")


def fault(snapshot: Snapshot, found: FaultView, events: Sequence[EventRecord]) -> Explanation:
    problems = [
        p for p in find_problems(snapshot) if p.object in (found.target, f"fault {found.id}") or found.id in p.reason
    ]
    until = found.created + found.duration_s + AFTERMATH_S
    about = [
        e
        for e in events
        if found.id in e.reason or (e.injected and e.object == found.target and found.created <= e.time <= until)
    ]
    return Explanation(
        replica=f"fault {found.id}",
        state=found.state.value,
        summary=_in_words(found),
        findings=(
            *_of_fault(found),
            *_of_target(snapshot, found),
            *(Finding(p.object, p.reason) for p in problems),
        ),
        events=tuple(about[-EVENTS_SHOWN:]),
        action=_what_to_do(found),
        kind="fault",
    )


def _in_words(fault: FaultView) -> str:
    left = "" if fault.state.over or fault.irreversible else f", {show(max(0.0, fault.ttl_left_s))} left"
    why = f" ({fault.reason})" if fault.reason else ""
    return f"{fault.kind} on {fault.target} by {fault.owner}{why}{left}"


def _of_fault(fault: FaultView) -> Iterator[Finding]:
    source = f"agent of {fault.node}"
    if fault.detail:
        yield Finding(source, fault.detail)
    if fault.params:
        yield Finding(source, "with " + ", ".join(f"{name} {value}" for name, value in sorted(fault.params.items())))
    if fault.irreversible:
        yield Finding(source, "what it did cannot be taken back")
    if fault.warning:
        yield Finding(source, fault.warning)
    for command in fault.undo:
        yield Finding(source, f"by hand: {command}")


def _of_target(snapshot: Snapshot, fault: FaultView) -> Iterator[Finding]:
    """What its target is like now, whatever the fault should have done."""
    for view in snapshot.views():
        for nic in view.nics:
            if f"{view.name}/{nic.name}" == fault.target:
                yield Finding(f"agent of {view.name}", f"{nic.name} is {rail_word(nic)} now")
        for process in view.processes:
            if view.name == fault.node and fault.target.startswith(f"{view.name}/{process.replica}"):
                yield Finding(f"agent of {view.name}", f"{process.replica} is {process.state} now")


def _what_to_do(fault: FaultView) -> str:
    if fault.state is FaultState.STUCK:
        by_hand = f"   # or by hand on {fault.node}: {'; '.join(fault.undo)}" if fault.undo else ""
        return f"ftctl revert {fault.id}{by_hand}"
    return "" if fault.state.over or fault.irreversible else f"ftctl revert {fault.id}"
