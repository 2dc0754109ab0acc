"""`ftctl links`: the connections of all processes, rail by rail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import OutputFormat, plain_app, with_cluster

if TYPE_CHECKING:
    from agents.api.models import LinksAnswer
    from ftctl.client.cluster import Agents, Cluster, Snapshot
    from ftctl.errors import CliError

app = plain_app()


@app.command()
@with_cluster
def links(
    cluster: Cluster,
    *,
    node: Annotated[str | None, typer.Option("--node", metavar="NODES", help="Only these nodes (node[0-3]).")] = None,
    rail: Annotated[str, typer.Option("--rail", metavar="RAIL", help="Only this rail or NIC.")] = "",
    state: Annotated[
        str, typer.Option("--state", metavar="STATE", help="Only rails that are UP, DOWN, PROBING, HOLD or SILENT.")
    ] = "",
    pid: Annotated[int | None, typer.Option("--pid", min=1, help="Only this process.")] = None,
    each: Annotated[bool, typer.Option("--each", help="A row for each connection, not for each peer.")] = False,
) -> ExitCode | None:
    """Show the links of all processes, rail by rail: training ranks, and those that only run NCCL.

    Exit code 6 when an agent did not answer (its links are then not in the list).
    """
    from ftctl.client import links as joined
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError, UsageProblem
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render import links as view

    if state and state.upper() not in joined.STATES:
        raise UsageProblem(f"--state {state}", f"a rail is {', '.join(joined.STATES)}", "ftctl links --help")
    nodes = nodes_named(cluster.inventory, node)

    async def ask(agents: Agents) -> tuple[Snapshot, dict[str, LinksAnswer | CliError]]:
        snapshot = await agents.snapshot()
        answers = await agents.each(
            lambda client: client.links(rail=rail, state=state.upper(), pid=pid, each=each), nodes
        )
        return snapshot, answers

    snapshot, answers = cluster.run(ask)
    known = joined.peers(snapshot)
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    rows = [(name, row) for name, a in answers.items() if not isinstance(a, CliError) for row in a.links]
    left_out = sum(answer.left_out for answer in answers.values() if not isinstance(answer, CliError))
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "links": [view.document(name, row, known) for name, row in rows],
            "left_out": left_out,
            "errors": [str(error) for error in errors],
        }
        document.emit(cluster.world, cluster.output, whole)
    elif rows:
        wide = cluster.output is OutputFormat.WIDE
        tables.show(cluster.world.console(), view.rows(rows, known, wide=wide))
    elif not errors:
        cluster.world.say("no links" if not (rail or state or pid) else "no links like that")
    if left_out:
        cluster.world.say(f"{left_out} more: narrow it with --node, --rail, --state or --pid")
    for error in errors:
        cluster.world.say(f"error: {error}")
    return most_urgent(error.code for error in errors)
