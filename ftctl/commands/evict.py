"""`ftctl evict replica R`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.membership import DryRun, Force, Incident, Reason, ReplicaName, Wait, WaitTimeout, Yes, carry_out
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_group("Remove something from the job at once.")


@app.command()
@with_cluster
def replica(
    cluster: Cluster,
    name: ReplicaName,
    *,
    reason: Reason,
    incident: Incident = "",
    yes: Yes = False,
    stay_out: Annotated[
        bool, typer.Option("--stay-out", help="It may not come back by itself, only with `ftctl rejoin replica`.")
    ] = False,
    wait: Wait = True,
    wait_timeout: WaitTimeout = "60s",
    dry_run: DryRun = False,
    force: Force = False,
) -> ExitCode | None:
    """Remove a replica immediately: the others reduce the running step again without it."""
    return carry_out(
        cluster,
        "evict",
        name,
        reason=reason,
        incident=incident,
        dry_run=dry_run,
        force=force,
        rejoin=not stay_out,
        goal="evicted" if wait else "",
        wait_timeout=wait_timeout,
        question=None
        if yes or dry_run
        else "Evict {replica} of job {job}? This is immediate: its work on the running step is lost.",
    )
