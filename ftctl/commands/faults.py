"""`ftctl faults`: what is injected, by whom, and for how long still."""

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
def faults(
    cluster: Cluster,
    every: Annotated[bool, typer.Option("--all", help="Also those reverted in the last hour.")] = False,
    node: Annotated[str | None, typer.Option("--node", metavar="NODES", help="Only these nodes (node[0-3]).")] = None,
) -> ExitCode | None:
    """List faults: their state, time left and owner.

    Exit code 5 when a fault is stuck, 6 when an agent did not answer (its faults are then not in the list).
    """
    from agents.api.models import FaultState
    from ftctl.client.agent import AgentClient
    from ftctl.client.cluster import Agents
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render.status import fault_table

    async def ask(agents: Agents) -> dict[str, object]:
        return dict(await agents.each(AgentClient.faults, nodes_named(cluster.inventory, node)))

    answers = cluster.run(ask)
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    found = [fault for answer in answers.values() if isinstance(answer, list) for fault in answer]
    shown = sorted((f for f in found if every or not f.state.over), key=lambda f: f.created)
    if cluster.output.for_machines:
        document.emit(
            cluster.world,
            cluster.output,
            {
                "schema": document.SCHEMA,
                "faults": [document.fault(f) for f in shown],
                "errors": [str(error) for error in errors],
            },
        )
    elif shown:
        tables.show(cluster.world.console(), fault_table(shown))
    elif not errors:
        cluster.world.say("no faults")
    for error in errors:
        cluster.world.say(f"error: {error}")
    stuck = [ExitCode.IN_FORCE for f in shown if f.state is FaultState.STUCK]
    return most_urgent([*stuck, *(error.code for error in errors)])
