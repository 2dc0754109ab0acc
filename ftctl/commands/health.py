"""`ftctl health`: verdicts on what the nodes consist of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster

if TYPE_CHECKING:
    from agents.api.health import HealthAnswer
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.errors import CliError

app = plain_app()


@app.command()
@with_cluster
def health(
    cluster: Cluster,
    nodes: Annotated[str | None, typer.Argument(metavar="NODES", help="Only these nodes (node1, node[0-3]).")] = None,
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="With evidence, suggested action, closed incidents, and what looks.")
    ] = False,
) -> ExitCode | None:
    """Show what is wrong with GPUs, NICs and other parts, and with what evidence.

    Exit code 1: something is degraded or unhealthy; 6: an agent did not answer.
    """
    from agents.api.health import HealthAnswer
    from agents.api.words import Health
    from ftctl.client.agent import AgentClient
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render import health as view

    async def ask(agents: Agents) -> dict[str, HealthAnswer | CliError]:
        return await agents.each(AgentClient.health, nodes_named(cluster.inventory, nodes, "NODES"))

    answers = cluster.run(ask)
    found = {name: answer for name, answer in answers.items() if isinstance(answer, HealthAnswer)}
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "nodes": [answer.model_dump(mode="json", by_alias=True) for answer in found.values()],
            "errors": [str(error) for error in errors],
        }
        document.emit(cluster.world, cluster.output, whole)
    elif found:
        now = cluster.world.unix_time()
        tables.show(cluster.world.console(), *view.parts(found, now=now, explain=explain))
    for error in errors:
        cluster.world.say(f"error: {error}")
    sick = any(v.health in (Health.DEGRADED, Health.UNHEALTHY) for answer in found.values() for v in answer.verdicts)
    return most_urgent([*(error.code for error in errors), ExitCode.FAILED if sick else ExitCode.OK])
