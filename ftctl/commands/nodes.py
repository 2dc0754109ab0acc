"""What cordon, uncordon and drain of a node share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode

if TYPE_CHECKING:
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.client.nodes import NodeResult, ReplicaResult
    from ftctl.render.document import Document

NodeNames = Annotated[str, typer.Argument(metavar="NODES", help="node1, or several: node[0-3].")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why (required); shown in the status.")]
WithoutDoing = Annotated[bool, typer.Option("--dry-run", help="Make all checks, and change nothing.")]


def set_apart(cluster: Cluster, verb: str, names: str, *, reason: str, dry_run: bool) -> ExitCode:
    """Cordon or uncordon."""
    from ftctl.client import nodes

    chosen = checked(cluster, verb, names, reason)
    act = nodes.cordon if verb == "cordon" else nodes.uncordon

    async def work(agents: Agents) -> list[NodeResult]:
        return await act(agents, chosen, reason, dry_run=dry_run)

    return shown(cluster, verb, cluster.run(work), [], dry_run=dry_run)


def empty(
    cluster: Cluster, names: str, *, reason: str, dry_run: bool, force: bool, wait: bool, wait_timeout: str
) -> ExitCode:
    """Drain: cordon, then let every replica with a rank there leave at a step boundary."""
    from agents.api.models import ReplicaAction
    from ftctl import durations
    from ftctl.client import nodes
    from ftctl.errors import UsageProblem

    chosen = checked(cluster, "drain", names, reason)
    try:
        timeout_s = durations.parse(wait_timeout)
    except durations.DurationError as error:
        raise UsageProblem("--wait-timeout", str(error)) from None
    wish = ReplicaAction(reason=reason, force=force, dry_run=dry_run)

    async def work(agents: Agents) -> tuple[list[NodeResult], list[ReplicaResult]]:
        snapshot = await agents.snapshot()
        if snapshot.job is None and not (snapshot.finished() or snapshot.needs_no_coordinator()):
            _cannot_ask(snapshot.job_error, names)
        leaving = nodes.to_drain(snapshot, chosen)
        nodes.refuse_drain(snapshot, leaving, force=force)
        # First the cordon: what is drained must not be started there again.
        apart = await nodes.cordon(agents, chosen, reason, dry_run=dry_run)
        gone = await nodes.drain(agents, snapshot, leaving, wish, wait_s=timeout_s if wait else None)
        return apart, gone

    apart, gone = cluster.run(work)
    return shown(cluster, "drain", apart, gone, dry_run=dry_run)


def _cannot_ask(error: Exception | None, names: str) -> None:
    from ftctl.errors import CliError

    code = error.code if isinstance(error, CliError) else ExitCode.FAILED
    reason = f"nothing was done: the job cannot be asked ({error})"
    hint = f"ftctl cordon node {names} sets it apart without the coordinator"
    raise CliError(f"drain of {names}", reason, hint, code)


def checked(cluster: Cluster, verb: str, names: str, reason: str) -> list[str]:
    """The nodes that are meant. Raises UsageProblem."""
    from ftctl.client.selection import nodes_named
    from ftctl.errors import UsageProblem

    if not reason.strip():
        raise UsageProblem("--reason", f"{verb} needs a reason, and it is empty")
    return nodes_named(cluster.inventory, names, "NODES")


def shown(
    cluster: Cluster, verb: str, apart: list[NodeResult], gone: list[ReplicaResult], *, dry_run: bool
) -> ExitCode:
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document

    said = [*(one.error for one in apart), *(one.error for one in gone)]
    errors = [error for error in said if error is not None]
    if cluster.output.for_machines:
        whole: Document = {
            "schema": document.SCHEMA,
            "action": verb,
            "dry_run": dry_run,
            "nodes": [
                {
                    "name": one.name,
                    "changed": one.changed,
                    "cordon": one.cordon.model_dump(mode="json") if one.cordon is not None else None,
                    "error": str(one.error) if one.error is not None else "",
                }
                for one in apart
            ],
            "replicas": [
                {
                    "name": one.name,
                    "nodes": list(one.nodes),
                    "text": one.text,
                    "state": one.state or None,
                    "error": str(one.error) if one.error is not None else "",
                }
                for one in gone
            ],
        }
        document.emit(cluster.world, cluster.output, whole)
    else:
        _say(cluster, verb, apart, gone, dry_run=dry_run)
    for error in errors:
        cluster.world.say(f"error: {error}")
        if error.hint:
            cluster.world.say(f"next:  {error.hint}")
    return most_urgent(error.code for error in errors)


def _say(cluster: Cluster, verb: str, apart: list[NodeResult], gone: list[ReplicaResult], *, dry_run: bool) -> None:
    say, before = cluster.world.say, "dry run: " if dry_run else ""
    done = "uncordoned" if verb == "uncordon" else "cordoned"
    for one in apart:
        if one.error is not None:
            continue
        if one.changed:
            say(f"{before}{one.name}: {'would be ' if dry_run else ''}{done}")
        elif one.cordon is not None and verb != "uncordon":
            say(f"{before}{one.name}: is cordoned already, by {one.cordon.by}: {one.cordon.reason}")
        else:
            say(f"{before}{one.name}: was not cordoned")
    for replica in gone:
        if replica.error is None:
            text = replica.text if replica.text.startswith(f"{replica.name} ") else f"{replica.name}: {replica.text}"
            say(f"{before}{replica.name}: {replica.state}" if replica.state else f"{before}{text}")
    if verb == "drain" and not gone:
        say(f"{before}no replica of the job is there")
    names = [one.name for one in apart if one.error is None]
    if verb != "uncordon" and names and not dry_run:
        back = "".join(f" && ftctl rejoin replica {one.name}" for one in gone if one.error is None)
        say(f"use it again with: ftctl uncordon node {','.join(names)}{back}")
