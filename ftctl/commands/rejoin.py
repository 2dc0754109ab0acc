"""`ftctl rejoin replica R`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.membership import DryRun, Force, Incident, ReplicaName, WaitTimeout, carry_out
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_group("Bring something back into the job.")


@app.command()
@with_cluster
def replica(
    cluster: Cluster,
    name: ReplicaName,
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown in the events.")] = "",
    incident: Incident = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it contributes, or is a hot spare.")
    ] = False,
    wait_timeout: WaitTimeout = "120s",
    dry_run: DryRun = False,
    force: Force = False,
) -> ExitCode | None:
    """Start a drained or evicted replica again; it catches up without slowing the others, then contributes.

    Where a hot spare has taken its place, it becomes the new spare."""
    return carry_out(
        cluster,
        "rejoin",
        name,
        reason=reason,
        incident=incident,
        dry_run=dry_run,
        force=force,
        goal="contributing" if wait else "",
        wait_timeout=wait_timeout,
    )
