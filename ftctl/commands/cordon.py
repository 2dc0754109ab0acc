"""`ftctl cordon node N`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftctl.commands.nodes import NodeNames, Reason, WithoutDoing, set_apart
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_group("Set a node apart: no replica is started on it.")


@app.command()
@with_cluster
def node(cluster: Cluster, nodes: NodeNames, *, reason: Reason, dry_run: WithoutDoing = False) -> ExitCode | None:
    """Start no replica on these nodes any more, until `ftctl uncordon node`; what runs there goes on.

    Their agents keep it over restarts, and refuse a rejoin. Exit code 6: one did not answer, and its node is as before.
    """
    return set_apart(cluster, "cordon", nodes, reason=reason, dry_run=dry_run)
