"""`ftctl events`: what happened, in one order, from everybody who saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import OutputFormat, plain_app, with_cluster

if TYPE_CHECKING:
    from agents.api.models import EventRecord
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.errors import CliError

app = plain_app()


@app.command()
@with_cluster
def events(
    cluster: Cluster,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen, until Ctrl-C.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only the last 30s, 10m, 2h. With -f: 10s if not given."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODES", help="Only what these nodes' agents saw (not the coordinator)."),
    ] = None,
    incident: Annotated[
        str | None, typer.Option("--incident", metavar="ID", help="Only what belongs to this incident (i-1a2b3c4d).")
    ] = None,
) -> ExitCode | None:
    """Show what happened, from all agents and the coordinator.

    JSON: one document, or with -f or --incident one event a line. Exit code 6 when an agent did not answer.
    """
    from ftctl import durations
    from ftctl.client import events as source
    from ftctl.client.selection import nodes_named
    from ftctl.errors import UsageProblem
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document
    from ftctl.render import events as view
    from ftctl.render.tables import Harmless

    world = cluster.world
    nodes = nodes_named(cluster.inventory, node)
    try:
        since_s = durations.parse(since) if since is not None else 10.0 if follow else None
    except durations.DurationError as error:
        raise UsageProblem("--since", str(error)) from None
    earliest = 0.0 if since_s is None else world.unix_time() - since_s
    console = world.console()

    def show(event: EventRecord) -> None:
        if incident is not None and event.incident != incident:
            return
        if cluster.output.for_machines and incident is not None:
            world.out(document.as_line({"schema": document.SCHEMA, **view.of_incident(event)}))
        elif cluster.output.for_machines:
            world.out(document.as_line({"schema": document.SCHEMA, **view.document(event)}))
        else:
            console.print(Harmless(view.line(event)), soft_wrap=True)
            world.stdout.flush()

    if cluster.output is OutputFormat.YAML and (follow or incident is not None):
        flag = "-f" if follow else "--incident"
        raise UsageProblem("-o yaml", f"is for whole documents; with {flag} use -o json (one event a line)")
    if follow:

        async def forever(agents: Agents) -> None:
            await source.follow(agents, nodes, show, coordinator=node is None, since=earliest)

        cluster.run(forever)
        return ExitCode.OK

    async def once(agents: Agents) -> tuple[list[EventRecord], list[CliError]]:
        return await source.everything(agents, nodes, coordinator=node is None)

    found, errors = cluster.run(once)
    found = [e for e in found if e.time >= earliest and (incident is None or e.incident == incident)]
    if cluster.output.for_machines and incident is None:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "events": [view.document(event) for event in found],
            "errors": [str(error) for error in errors],
        }
        document.emit(world, cluster.output, whole)
    else:
        for event in found:
            show(event)
        if not found and not errors and incident is not None:
            world.say(f"no events of incident {incident} (ftctl health lists incidents)")
        elif not found and not errors:
            world.say(f"no events since {since} ago" if since is not None else "no events yet")
    for problem in errors:
        world.say(f"error: {problem}")
    return most_urgent(problem.code for problem in errors)
