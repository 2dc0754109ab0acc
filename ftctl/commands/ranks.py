"""`ftctl ranks`: the processes of the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_app()


@app.command()
@with_cluster
def ranks(
    cluster: Cluster,
    replica: Annotated[str | None, typer.Argument(metavar="[REPLICA]", help="Only this one: r1, or JOB/r1.")] = None,
) -> ExitCode | None:
    """Show the processes of the replicas, their links and their logs."""
    from ftctl.client import ranks as joined
    from ftctl.errors import AgentUnreachable
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render import ranks as view

    snapshot = cluster.snapshot()
    name = snapshot.replica(replica) if replica is not None else None
    rows = [row for row in joined.rows(snapshot) if name is None or row.replica == name]
    if cluster.output.for_machines:
        whole: document.Document = {"schema": document.SCHEMA, "ranks": [view.document(row) for row in rows]}
        document.emit(cluster.world, cluster.output, whole)
    else:
        tables.show(cluster.world.console(), *view.parts(rows, one=name is not None))
    lost = [node.error for node in snapshot.nodes if node.error is not None]
    for error in lost:
        cluster.world.say(f"error: {error}")
    return most_urgent(error.code for error in lost if isinstance(error, AgentUnreachable))
