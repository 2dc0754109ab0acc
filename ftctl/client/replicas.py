"""Operators' requests about one replica: whom to ask, and how to tell that it came true."""

from __future__ import annotations

from collections.abc import Callable

from agents.api.models import ActionAnswer, JobState, ReplicaAction, ReplicaState
from ftctl.client.agent import AgentClient
from ftctl.client.cluster import Agents, Snapshot
from ftctl.durations import show
from ftctl.errors import AgentUnreachable, CliError
from ftctl.exit_codes import ExitCode

POLL_S = 0.2  # a step of the lab takes as long; the answer comes from the coordinator's memory

STATES = (
    "starting",
    "suspect",
    "hung",
    "fetching",
    "replaying",
    "spare",
    "contributing",
    "draining",
    "drained",
    "evicted",
    "blocked",
    "unreachable",
)
_REPLY_CODES = {"refused": ExitCode.REFUSED, "unknown": ExitCode.USAGE}


async def act(agents: Agents, snapshot: Snapshot, verb: str, replica: str, request: ReplicaAction) -> ActionAnswer:
    """Ask one agent to drain, evict or rejoin. Raises CliError when it is refused or fails.

    A rejoin starts the replica's processes again, so it must reach the agents that supervise them. Drain and evict are
    the coordinator's business, and any agent can carry them; the replica's own is tried first, for its events. Where a
    replica is on several nodes, the agents of the others are told what to do with its processes there.
    """
    asked = ""

    async def ask(client: AgentClient) -> ActionAnswer:
        nonlocal asked
        asked = client.node
        return await client.replica_action(verb, replica, request)

    if verb == "rejoin":
        _refuse_on_cordoned(snapshot, replica)
    prefer = snapshot.hosts(replica)
    supervisors = snapshot.supervisors(replica)
    if verb == "rejoin" and not supervisors:
        silent = [name for name in prefer if name in snapshot.unreachable()]
        if silent:
            raise AgentUnreachable(
                silent[0], f"does not answer, and it is the one that starts {replica}", hint="ftctl status"
            )
    only = verb == "rejoin" and bool(supervisors)
    answer = await agents.act(ask, supervisors if only else prefer, only_preferred=only)
    if answer.code != "ok":
        code = _REPLY_CODES.get(answer.code, ExitCode.FAILED)
        raise CliError(f"replica {replica}", answer.text or answer.code, f"ftctl why replica {replica}", code)
    if not request.dry_run:
        state = find(snapshot.job, replica) if snapshot.job else None
        drained = state is not None and state.state in ("drained", "draining")
        others = [node for node in supervisors if node != asked]
        await _tell_others(agents, others, verb, replica, request, drained=drained)
    return answer


def _refuse_on_cordoned(snapshot: Snapshot, replica: str) -> None:
    """Raises CliError when a node that would start it is set apart: the replica could not come back whole."""
    supervisors = snapshot.supervisors(replica)
    for view in snapshot.views():
        if view.cordon is not None and view.name in supervisors:
            why = f"{view.name} is cordoned by {view.cordon.by}: {view.cordon.reason}"
            raise CliError(f"replica {replica}", why, f"ftctl uncordon node {view.name}", ExitCode.REFUSED)


async def _tell_others(
    agents: Agents, nodes: list[str], verb: str, replica: str, request: ReplicaAction, *, drained: bool
) -> None:
    """The other nodes of a replica that is on several. A drained rank ends by itself; one of an evicted replica may not
    (that may be why it was evicted), and what is left of it is in the way of the next life. Raises CliError."""
    back = "rejoin" if drained else "restart"
    there = {"rejoin": back, "evict": "restart" if request.rejoin else "stop"}.get(verb)
    if there is None:
        return
    for node in nodes:
        client = await agents.client(node)
        await client.supervise(there, replica, f"{verb} of {replica}: {request.reason}")


def find(job: JobState, replica: str) -> ReplicaState | None:
    return next((state for state in job.replicas if state.name == replica), None)


async def until(
    agents: Agents,
    replica: str,
    reached: Callable[[ReplicaState], bool],
    *,
    goal: str,
    timeout_s: float,
    on_change: Callable[[ReplicaState], None] = lambda _state: None,
    or_spare: bool = False,
) -> ReplicaState:
    """Poll the job until `reached`; with `or_spare` also until it is a hot spare of a job that has all contributors.
    Raises CliError when it takes longer, or can come no more (the job has ended).

    A coordinator or agents that are away for a while are waited for: a restart of either must not end the wait.
    """
    clock = agents.world.monotonic
    deadline = clock() + timeout_s
    last: ReplicaState | None = None
    trouble: CliError | None = None
    while True:
        try:
            job = await agents.any_agent(AgentClient.job)
        except CliError as error:
            if error.code is ExitCode.USAGE:
                raise
            trouble = error
        else:
            trouble = None
            state = find(job, replica)
            if state is not None:
                if last is None or (last.state, last.reason) != (state.state, state.reason):
                    on_change(state)
                last = state
                full = len(job.contributors) >= job.replicas_wanted
                if reached(state) or (or_spare and full and state.state == "spare"):
                    return state
            if job.state in ("finished", "stopped"):
                raise CliError(
                    f"replica {replica}", f"job {job.name} is {job.state} ({job.reason}), so it will not be {goal}"
                )
        if clock() >= deadline:
            raise _not_reached(replica, goal, timeout_s, last, trouble)
        await agents.world.sleep(min(POLL_S, max(0.01, deadline - clock())))


def _not_reached(
    replica: str, goal: str, timeout_s: float, last: ReplicaState | None, trouble: CliError | None
) -> CliError:
    if trouble is not None:
        return CliError(
            f"replica {replica}",
            f"not known to be {goal} after {show(timeout_s)}: {trouble}",
            "ftctl status",
            trouble.code,
        )
    now = (
        "unknown to the coordinator" if last is None else f"{last.state}: {last.reason}" if last.reason else last.state
    )
    rejoin = last is not None and last.state in ("drained", "evicted") and goal == "contributing"
    hint = f"ftctl rejoin replica {replica}" if rejoin else f"ftctl why replica {replica}"
    return CliError(f"replica {replica}", f"not {goal} after {show(timeout_s)}; it is {now}", hint)
