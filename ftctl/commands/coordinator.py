"""`ftctl coordinator status | force-quorum`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftctl.commands.membership import DryRun, Reason, Yes, confirm
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from agents.api.models import ActionAnswer, JobState
    from ftctl.client.cluster import Agents, Cluster

app = plain_group("Look at the coordinator, or settle a job that lost its record.")


@app.command()
@with_cluster
def status(cluster: Cluster) -> ExitCode | None:
    """Show the job as the coordinator sees it, and its settings. Exit code 1 when it cannot be reached."""
    from ftctl.client.agent import AgentClient
    from ftctl.durations import show
    from ftctl.render import document, tables

    async def ask(agents: Agents) -> JobState:
        return await agents.any_agent(AgentClient.job)

    job = cluster.run(ask)
    if cluster.output.for_machines:
        document.emit(cluster.world, cluster.output, {"schema": document.SCHEMA, "job": job.model_dump(mode="json")})
        return ExitCode.OK
    age = show(max(0.0, cluster.world.unix_time() - job.started)) if job.started else "unknown"
    rows = [
        ("job", job.name),
        ("state", job.state + (f": {job.reason}" if job.reason else "")),
        ("coordinator", f"pid {job.pid}, up {age}"),
        ("term and epoch", f"{job.term}.{job.epoch}"),
        ("step", str(job.step)),
        (
            "contributors",
            f"{' '.join(job.contributors) or 'none'} ({len(job.contributors)} of {job.replicas_wanted},"
            f" at least {job.min_replicas})",
        ),
        *((name, f"{value:g}") for name, value in sorted(job.settings.items())),
    ]
    tables.show(cluster.world.console(), tables.table("", ("what", "value"), rows))
    return ExitCode.OK


@app.command("force-quorum")
@with_cluster
def force_quorum(cluster: Cluster, reason: Reason, yes: Yes = False, dry_run: DryRun = False) -> ExitCode | None:
    """Go on without the members that are absent, after the coordinator's record was lost.

    Their incarnations are revoked: what only they knew (a step that they had finished) is given up.
    """
    from agents.api.models import CoordinatorAction
    from ftctl.client.agent import AgentClient
    from ftctl.errors import CliError, UsageProblem
    from ftctl.render import document

    if not reason.strip():
        raise UsageProblem("--reason", "force-quorum needs a reason, and it is empty")
    request = CoordinatorAction(reason=reason, dry_run=dry_run)

    async def ask(client: AgentClient) -> ActionAnswer:
        return await client.force_quorum(request)

    async def work(agents: Agents) -> ActionAnswer:
        job = await agents.any_agent(AgentClient.job)
        if not yes and not dry_run:
            confirm(
                cluster,
                f"Job {job.name} is {job.state} ({job.reason}). Go on without the absent members? They lose what only"
                " they knew.",
            )
        return await agents.act(ask)

    answer = cluster.run(work)
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "action": "force-quorum",
            "dry_run": dry_run,
            "code": answer.code,
            "text": answer.text,
        }
        document.emit(cluster.world, cluster.output, whole)
    elif answer.code == "ok":
        cluster.world.say(f"{'dry run: ' if dry_run else ''}{answer.text or 'ok'}")
    if answer.code != "ok":
        code = ExitCode.REFUSED if answer.code == "refused" else ExitCode.FAILED
        raise CliError("coordinator", answer.text or answer.code, "ftctl coordinator status", code)
    return ExitCode.OK
