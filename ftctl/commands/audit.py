"""`ftctl audit`: who asked for which change, from where, why, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster

if TYPE_CHECKING:
    from agents.api.audit import AuditAnswer, AuditRecord
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.errors import CliError

app = plain_app()


@app.command()
@with_cluster
def audit(
    cluster: Cluster,
    *,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="Only the last 10m, 2h, 1d.")] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NODES", help="Only these nodes (node[0-3]).")] = None,
) -> ExitCode | None:
    """Show who asked for which change, from where, why, and what came of it.

    Requests that were refused are there too; the oldest first. Agents keep them over restarts, the newest 4 to 8 MiB
    each. Exit code 6 when an agent did not answer.
    """
    from ftctl import durations
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError, UsageProblem
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables

    world = cluster.world
    try:
        earliest = 0.0 if since is None else max(0.0, world.unix_time() - durations.parse(since))
    except durations.DurationError as error:
        raise UsageProblem("--since", str(error)) from None

    async def ask(agents: Agents) -> dict[str, AuditAnswer | CliError]:
        return await agents.each(lambda client: client.audit(earliest), nodes_named(cluster.inventory, node))

    answers = cluster.run(ask)
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    good = {name: answer for name, answer in answers.items() if not isinstance(answer, CliError)}
    records = sorted((record for answer in good.values() for record in answer.records), key=lambda r: r.time)
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "records": [record.model_dump(mode="json") for record in records],
            "errors": [str(error) for error in errors],
        }
        document.emit(world, cluster.output, whole)
    elif records:
        heads = ("time", "node", "who", "from", "action", "result", "what and why")
        tables.show(world.console(), tables.table("", heads, [_row(record) for record in records]))
    elif not errors:
        world.say("no requests for changes" + (f" in the last {since}" if since is not None else ""))
    for name, answer in good.items():
        if answer.trouble:
            world.say(f"warning: {name} keeps its newest records in memory only: {answer.trouble}")
    for problem in errors:
        world.say(f"error: {problem}")
    return most_urgent(problem.code for problem in errors)


def _row(record: AuditRecord) -> tuple[str, ...]:
    import time

    from ftctl.client.agent import printable

    # What ftctl adds by itself about other nodes is in `-o json`.
    said = " ".join(f"{key}={value}" for key, value in record.asks.items() if value is not False and key != "fleet")
    what = "; ".join(part for part in (f"{record.target} {said}".strip(), record.why, record.detail) if part)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    cells = (record.node, record.who or "-", record.source, record.action, record.result, what or "-")
    return (stamp, *map(printable, cells))
