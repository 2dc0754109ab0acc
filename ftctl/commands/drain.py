"""`ftctl drain replica R`, `ftctl drain node N`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.membership import DryRun, Force, Incident, Reason, ReplicaName, Wait, WaitTimeout, carry_out
from ftctl.commands.nodes import NodeNames, WithoutDoing, empty
from ftctl.commands.nodes import Reason as NodeReason
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_group("Let something leave the job at a step boundary, with nothing lost.")


@app.command()
@with_cluster
def replica(
    cluster: Cluster,
    name: ReplicaName,
    *,
    reason: Reason,
    incident: Incident = "",
    wait: Wait = True,
    wait_timeout: WaitTimeout = "60s",
    dry_run: DryRun = False,
    force: Force = False,
) -> ExitCode | None:
    """Let a replica leave at the end of the running step; it stays away until `ftctl rejoin replica`.

    If there is a hot spare, that takes its place at the same moment, and as many contribute as before."""
    return carry_out(
        cluster,
        "drain",
        name,
        reason=reason,
        incident=incident,
        dry_run=dry_run,
        force=force,
        goal="drained" if wait else "",
        wait_timeout=wait_timeout,
    )


@app.command()
@with_cluster
def node(
    cluster: Cluster,
    nodes: NodeNames,
    *,
    reason: NodeReason,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until its replicas have left.")] = True,
    wait_timeout: WaitTimeout = "60s",
    dry_run: WithoutDoing = False,
    force: Force = False,
) -> ExitCode | None:
    """Empty nodes: cordon them, and let every replica with a rank there leave at the end of the running step.

    The guard of min-replicas counts all of them together; when it refuses (exit code 7), nothing was done.
    """
    return empty(cluster, nodes, reason=reason, dry_run=dry_run, force=force, wait=wait, wait_timeout=wait_timeout)
