"""`ftctl uncordon node N`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.nodes import NodeNames, WithoutDoing, set_apart
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_group("Let a node that was set apart be used again.")


@app.command()
@with_cluster
def node(
    cluster: Cluster,
    nodes: NodeNames,
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown in the events.")] = "",
    dry_run: WithoutDoing = False,
) -> ExitCode | None:
    """Let replicas be started on these nodes again. Drained ones come back with `ftctl rejoin replica`."""
    return set_apart(cluster, "uncordon", nodes, reason=reason or "asked for", dry_run=dry_run)
