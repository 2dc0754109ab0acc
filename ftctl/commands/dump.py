"""`ftctl dump replica R`: what its processes are doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.membership import ReplicaName
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from agents.api.evidence import StacksAnswer
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.errors import CliError

app = plain_group("Show what processes are doing: the stacks of all their threads.")


@app.command()
@with_cluster
def replica(
    cluster: Cluster,
    name: ReplicaName,
    *,
    rank: Annotated[int | None, typer.Option("--rank", min=0, max=65535, help="Only this rank.")] = None,
    stacks: Annotated[bool, typer.Option("--stacks/--no-stacks", help="The stacks, or only a sentence each.")] = True,
) -> ExitCode | None:
    """Show the Python stacks and kernel states of a replica's processes, also of one that holds the GIL.

    Nothing is stopped, resumed or traced: a process that is stopped stays so, and is said to be. Exit code 6 when an
    agent did not answer.
    """
    from agents.api.evidence import StacksRequest
    from ftctl.errors import AgentRefused, CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render import dump as view

    async def ask(agents: Agents) -> tuple[str, dict[str, StacksAnswer | CliError]]:
        snapshot = await agents.snapshot()
        found = snapshot.replica(name)
        known = [node.name for node in cluster.inventory.nodes]
        hosts = [host for host in snapshot.hosts(found) if host in known]
        if not hosts:
            raise CliError(f"replica {found}", "no agent knows a process of it", f"ftctl why replica {found}")
        return found, await agents.each(lambda client: client.stacks(found, StacksRequest(rank=rank)), hosts)

    found, answers = cluster.run(ask)
    ranks = [one for answer in answers.values() if not isinstance(answer, CliError) for one in answer.ranks]
    ranks.sort(key=lambda one: one.rank)
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    if ranks:  # one node of several need not have the rank that was asked for
        errors = [e for e in errors if not (isinstance(e, AgentRefused) and e.error_code == "unknown-replica")]
    elif errors:
        raise errors[0]
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "replica": found,
            "ranks": [view.document(one, stacks=stacks) for one in ranks],
            "errors": [str(error) for error in errors],
        }
        document.emit(cluster.world, cluster.output, whole)
    else:
        tables.show(cluster.world.console(), *view.parts(ranks, stacks=stacks))
    for error in errors:
        cluster.world.say(f"error: {error}")
    return most_urgent(error.code for error in errors)
