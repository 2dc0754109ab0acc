"""Whole nodes: set apart, used again, and emptied of the replicas that have ranks on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agents.api.cordon import CordonAnswer, CordonRequest, CordonView
from agents.api.models import ReplicaAction, ReplicaState
from ftctl.client import replicas
from ftctl.client.cluster import Agents, Snapshot
from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode

AWAY = ("drained", "evicted", "unreachable")


@dataclass(frozen=True)
class NodeResult:
    """`changed`: this call did it (or would). `cordon`: what stands now. `error`: then nothing was changed there."""

    name: str
    changed: bool = False
    cordon: CordonView | None = None
    error: CliError | None = None


@dataclass(frozen=True)
class ReplicaResult:
    """One replica of a drain: what the coordinator said, where it ended up, or why not."""

    name: str
    nodes: tuple[str, ...]
    text: str = ""
    state: str = ""
    error: CliError | None = None


async def cordon(agents: Agents, nodes: Iterable[str], reason: str, *, dry_run: bool) -> list[NodeResult]:
    wish = CordonRequest(reason=reason, dry_run=dry_run)
    return _results(await agents.each(lambda client: client.cordon(wish), nodes))


async def uncordon(agents: Agents, nodes: Iterable[str], reason: str, *, dry_run: bool) -> list[NodeResult]:
    wish = CordonRequest(reason=reason, dry_run=dry_run)
    return _results(await agents.each(lambda client: client.uncordon(wish), nodes))


def _results(answers: dict[str, CordonAnswer | CliError]) -> list[NodeResult]:
    return [
        NodeResult(name, error=answer)
        if isinstance(answer, CliError)
        else NodeResult(name, answer.changed, answer.cordon)
        for name, answer in answers.items()
    ]


def to_drain(snapshot: Snapshot, nodes: Iterable[str]) -> list[ReplicaState]:
    """Replicas with a rank on one of these nodes that are still in the job. Those that contribute come last: a spare
    that stands on the same nodes must be gone before it could be promoted into their place."""
    wanted = set(nodes)
    found = [
        state
        for state in (snapshot.job.replicas if snapshot.job is not None else [])
        if state.state not in AWAY and wanted & set(snapshot.hosts(state.name))
    ]
    return sorted(found, key=lambda state: (state.state == "contributing", state.name))


def refuse_drain(snapshot: Snapshot, leaving: list[ReplicaState], *, force: bool) -> None:
    """The coordinator's guard for each replica, applied to all of them at once. Raises CliError: nothing was done."""
    job = snapshot.job
    names = {state.name for state in leaving}
    if job is None or not names & set(job.contributors):
        return
    staying = [name for name in job.contributors if name not in names]
    spares = [state.name for state in job.replicas if state.state == "spare" and state.name not in names]
    what = f"drain of {', '.join(sorted(names))}"
    if not staying and not spares:
        raise CliError(what, "no contributor would be left: the state of the job would be gone", "", ExitCode.REFUSED)
    if len(staying) + len(spares) < job.min_replicas and not force:
        reason = f"{len(staying)} contributors would be left, min-replicas is {job.min_replicas}; nothing was done"
        raise CliError(what, reason, "--force overrides this guard; or drain fewer nodes", ExitCode.REFUSED)


async def drain(
    agents: Agents,
    snapshot: Snapshot,
    leaving: list[ReplicaState],
    wish: ReplicaAction,
    *,
    wait_s: float | None,
) -> list[ReplicaResult]:
    """Ask for all of them, then with `wait_s` see them gone, within that time together. Never raises CliError."""
    asked: list[ReplicaResult] = []
    for state in leaving:
        hosts = tuple(snapshot.hosts(state.name))
        if state.state == "draining":
            asked.append(ReplicaResult(state.name, hosts, "is draining already"))
            continue
        try:
            answer = await replicas.act(agents, snapshot, "drain", state.name, wish)
        except CliError as error:
            asked.append(ReplicaResult(state.name, hosts, error=error))
        else:
            asked.append(ReplicaResult(state.name, hosts, answer.text or answer.code))
    if wait_s is None or wish.dry_run:
        return asked
    deadline = agents.world.monotonic() + wait_s
    return [await _gone(agents, one, max(0.01, deadline - agents.world.monotonic())) for one in asked]


async def _gone(agents: Agents, one: ReplicaResult, wait_s: float) -> ReplicaResult:
    if one.error is not None:
        return one
    try:
        state = await replicas.until(
            agents, one.name, lambda state: state.state in AWAY, goal="drained", timeout_s=wait_s
        )
    except CliError as error:
        return ReplicaResult(one.name, one.nodes, one.text, error=error)
    return ReplicaResult(one.name, one.nodes, one.text, state.state)
