"""`ftctl drain replica R`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftctl.commands.membership import DryRun, Force, Reason, ReplicaName, Wait, WaitTimeout, carry_out
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
        dry_run=dry_run,
        force=force,
        goal="drained" if wait else "",
        wait_timeout=wait_timeout,
    )
