"""`ftctl revert`: faults taken back now instead of at the end of their time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster

if TYPE_CHECKING:
    from agents.api.models import FaultView
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.errors import CliError

app = plain_app()


@app.command()
@with_cluster
def revert(
    cluster: Cluster,
    faults: Annotated[
        list[str] | None, typer.Argument(metavar="[FAULT]...", help="As `ftctl faults` names them.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All faults of all nodes (or of those named with --node).")
    ] = False,
    node: Annotated[str | None, typer.Option("--node", metavar="NODES", help="With --all: only these nodes.")] = None,
) -> ExitCode | None:
    """Take faults back now.

    Exit code 5 when one may still be in force, 6 when an agent did not answer (its faults revert by themselves when
    their time is over).
    """
    from ftctl.client.selection import nodes_named
    from ftctl.errors import UsageProblem

    if bool(faults) == every:
        raise UsageProblem("revert", "say which: fault ids, or --all", "ftctl faults")
    if node is not None and not every:
        raise UsageProblem("--node", "goes with --all only; a fault id already says where it is")
    nodes = nodes_named(cluster.inventory, node)

    async def work(agents: Agents) -> tuple[list[FaultView], list[CliError]]:
        return await (_all(agents, nodes) if every else _named(agents, faults or []))

    after, errors = cluster.run(work)
    return _show(cluster, after, errors)


async def _all(agents: Agents, nodes: list[str]) -> tuple[list[FaultView], list[CliError]]:
    from ftctl.client.agent import AgentClient
    from ftctl.errors import CliError

    answers = await agents.each(AgentClient.revert_all, nodes)
    after = [fault for answer in answers.values() if not isinstance(answer, CliError) for fault in answer.faults]
    return after, [answer for answer in answers.values() if isinstance(answer, CliError)]


async def _named(agents: Agents, ids: list[str]) -> tuple[list[FaultView], list[CliError]]:
    """Find out which node each fault is on, then revert it there."""
    from ftctl.client.agent import AgentClient
    from ftctl.errors import AgentUnreachable, CliError, UsageProblem

    answers = await agents.each(AgentClient.faults)
    where = {f.id: name for name, found in answers.items() if isinstance(found, list) for f in found}
    silent = [name for name, found in answers.items() if isinstance(found, AgentUnreachable)]
    refusals = [
        found for found in answers.values() if isinstance(found, CliError) and not isinstance(found, AgentUnreachable)
    ]
    after: list[FaultView] = []
    errors: list[CliError] = []
    for fault in dict.fromkeys(ids):
        if fault in where:
            client = await agents.client(where[fault])
            try:
                after += (await client.revert(fault)).faults
            except CliError as error:
                errors.append(error)
        elif refusals:
            errors.append(refusals[0])
        elif silent:
            errors.append(
                CliError(
                    f"fault {fault}",
                    f"not on the nodes that answer; no answer from {', '.join(silent)}",
                    "it reverts by itself when its time is over; ftctl faults",
                    ExitCode.UNREACHABLE,
                )
            )
        else:
            errors.append(UsageProblem(f"fault {fault}", "unknown on every node", "ftctl faults --all"))
    return after, errors


def _show(cluster: Cluster, after: list[FaultView], errors: list[CliError]) -> ExitCode:
    from ftctl.app import report
    from ftctl.client.injection import is_over, still_there
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render.status import fault_table

    errors = errors + [still_there(fault) for fault in after if not is_over(fault)]
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "faults": [document.fault(fault) for fault in after],
            "errors": [str(error) for error in errors],
        }
        document.emit(cluster.world, cluster.output, whole)
    elif after:
        tables.show(cluster.world.console(), fault_table(after))
    elif not errors:
        cluster.world.say("no faults to revert")
    for error in errors:
        report(cluster.world, error)
    return most_urgent(error.code for error in errors)
