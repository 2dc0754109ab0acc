"""What drain, evict and rejoin share: find the replica, ask the person, ask the right agent, see it come true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode

if TYPE_CHECKING:
    from agents.api.models import ReplicaState
    from ftctl.client.cluster import Agents, Cluster

ReplicaName = Annotated[str, typer.Argument(metavar="REPLICA", help="r1, or in full JOB/r1.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why (required); shown in the events.")]
Incident = Annotated[
    str, typer.Option("--incident", metavar="ID", help="It belongs to this incident (ftctl events --incident ID).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Let the coordinator make all checks, and change nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Also when fewer than min-replicas would be left.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has left.")]
WaitTimeout = Annotated[str, typer.Option("--wait-timeout", metavar="TIME", help="How long to wait at most.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_GONE = ("drained", "evicted", "unreachable")


def carry_out(
    cluster: Cluster,
    verb: str,
    name: str,
    *,
    reason: str,
    dry_run: bool,
    force: bool,
    goal: str,
    wait_timeout: str,
    rejoin: bool = True,
    incident: str = "",
    question: str | None = None,
) -> ExitCode:
    """Do it, and with a `goal` wait for it: drained, evicted (out of this incarnation), or contributing."""
    from agents.api.models import ReplicaAction
    from ftctl import durations
    from ftctl.client import replicas
    from ftctl.client.problems import way_in
    from ftctl.errors import UsageProblem
    from ftctl.render import document

    if verb != "rejoin" and not reason.strip():
        raise UsageProblem("--reason", f"{verb} needs a reason, and it is empty")
    try:
        timeout_s = durations.parse(wait_timeout)
    except durations.DurationError as error:
        raise UsageProblem("--wait-timeout", str(error)) from None
    world = cluster.world
    try:
        request = ReplicaAction(
            reason=reason or "asked for", force=force, rejoin=rejoin, dry_run=dry_run, incident=incident
        )
    except ValueError:
        raise UsageProblem("--incident", f"{incident!r} is no incident's id", "ftctl health lists incidents") from None

    async def work(agents: Agents) -> ExitCode:
        snapshot = await agents.snapshot()
        replica = snapshot.replica(name)
        if question is not None:
            confirm(cluster, question.format(replica=replica, job=snapshot.job_name))
        before = replicas.find(snapshot.job, replica) if snapshot.job else None
        incarnation = before.incarnation if before else 0
        answer = await replicas.act(agents, snapshot, verb, replica, request)
        if not cluster.output.for_machines:
            said = answer.text or answer.code
            who = "" if said.startswith(f"{replica} ") else f"{replica}: "
            world.say(f"{'dry run: ' if dry_run else ''}{who}{said}")

        def reached(state: ReplicaState) -> bool:
            if goal == "evicted":  # it may be back already, as a new incarnation
                return state.state in _GONE or state.incarnation != incarnation
            return state.state == goal

        state = None
        if goal and not dry_run:
            back = verb == "rejoin"
            state = await replicas.until(agents, replica, reached, goal=goal, timeout_s=timeout_s, or_spare=back)
        if cluster.output.for_machines:
            whole: document.Document = {
                "schema": document.SCHEMA,
                "action": verb,
                "replica": replica,
                "dry_run": dry_run,
                "code": answer.code,
                "text": answer.text,
                "state": state.state if state else None,
                "reason": state.reason if state else None,
            }
            document.emit(world, cluster.output, whole)
        elif state is not None:
            world.say(f"{replica}: {state.state} at step {state.step}" + (f" ({state.reason})" if state.reason else ""))
            if goal == "drained":
                world.say(f"bring it back with: ftctl rejoin replica {replica}")
        elif verb == "rejoin" and not dry_run:
            becomes = way_in(snapshot.job) if snapshot.job else "contributing"
            world.say(f"see it come back with: ftctl wait replica {replica} --for {becomes}")
        return ExitCode.OK

    return cluster.run(work)


def confirm(cluster: Cluster, question: str) -> None:
    """Ask a person; raises UsageProblem when nobody is there, and CliError when the answer is no."""
    from ftctl.errors import CliError, UsageProblem

    if not cluster.world.can_ask():
        raise UsageProblem("--yes", "is needed where nobody can be asked (no terminal); nothing was done")
    if not cluster.world.ask(question):
        raise CliError("", "not confirmed; nothing was done")
