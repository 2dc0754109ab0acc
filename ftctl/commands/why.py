"""`ftctl why replica R | rail NODE/NIC | node N | fault ID`: all that is known about why it is so, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.membership import ReplicaName
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from agents.api.models import EventRecord, FaultView
    from ftctl.client.cluster import Agents, Cluster, Snapshot
    from ftctl.client.explain import Explanation

app = plain_group("Explain why something is in its state.")


@app.command()
@with_cluster
def replica(cluster: Cluster, name: ReplicaName) -> ExitCode | None:
    """Explain the state of a replica: the coordinator's view, its processes, its rails, and what happened lately.

    Exit code 0 whenever there is an answer, whatever the replica's state is.
    """
    from ftctl.client import events, explain

    async def ask(agents: Agents) -> tuple[Snapshot, list[EventRecord]]:
        snapshot = await agents.snapshot()
        snapshot.replica(name)  # an unknown one ends here
        found, _ = await events.everything(agents, [node.name for node in cluster.inventory.nodes], coordinator=True)
        return snapshot, found

    snapshot, found = cluster.run(ask)
    answer = explain.replica(snapshot, snapshot.replica(name), found)
    return _show(cluster, answer)


@app.command()
@with_cluster
def rail(
    cluster: Cluster,
    name: Annotated[str, typer.Argument(metavar="NODE/NIC", help="As ftctl status has it: node1/rail0.")],
) -> ExitCode | None:
    """Explain what a rail carries and why: its NIC, the links of every process over it, their peers' ends, and events.

    Exit code 0 whenever there is an answer, whatever the rail's state is.
    """
    from agents.api.models import LinksAnswer
    from ftctl.client import events, explain
    from ftctl.errors import CliError, UsageProblem

    node, slash, nic = name.partition("/")
    if not (node and slash and nic):
        raise UsageProblem(f"rail {name}", "NODE/NIC is expected, such as node1/rail0", "ftctl status")
    node = cluster.inventory.node(node).name

    async def ask(agents: Agents) -> tuple[Snapshot, LinksAnswer | CliError, list[EventRecord]]:
        snapshot = await agents.snapshot()
        answers = await agents.each(lambda client: client.links(rail=nic, state="", pid=None, each=False), [node])
        found, _ = await events.everything(agents, [node], coordinator=False)
        return snapshot, answers[node], found

    snapshot, rows, found = cluster.run(ask)
    if isinstance(rows, CliError):
        raise rows
    answer = explain.rail(snapshot, node, nic, rows.links, found)
    return _show(cluster, answer)


@app.command()
@with_cluster
def node(
    cluster: Cluster, name: Annotated[str, typer.Argument(metavar="NODE", help="As ftctl status has it: node1.")]
) -> ExitCode | None:
    """Explain the state of a node: its agent, cordon, rails, GPUs, processes, replicas and faults, and events.

    Exit code 0 whenever there is an answer, whatever the node's state is.
    """
    from ftctl.client import events, explain_node

    name = cluster.inventory.node(name).name

    async def ask(agents: Agents) -> tuple[Snapshot, list[EventRecord]]:
        snapshot = await agents.snapshot()
        found, _ = await events.everything(agents, [name], coordinator=True)
        return snapshot, found

    snapshot, found = cluster.run(ask)
    return _show(cluster, explain_node.node(snapshot, name, found))


@app.command()
@with_cluster
def fault(
    cluster: Cluster,
    name: Annotated[str, typer.Argument(metavar="ID", help="As ftctl faults has it, or how it begins: f-72253355.")],
) -> ExitCode | None:
    """Explain a fault: who injected it and why, what it does now, how it is taken back, and what happened since.

    Exit code 0 whenever there is an answer, whatever the fault's state is.
    """
    from ftctl.client import events, explain_node
    from ftctl.client.agent import AgentClient

    async def ask(agents: Agents) -> tuple[Snapshot, FaultView, list[EventRecord]]:
        snapshot = await agents.snapshot()
        answers = await agents.each(AgentClient.faults)
        known = [f for answer in answers.values() if isinstance(answer, list) for f in answer]
        chosen = explain_node.choose(known, name)
        found, _ = await events.everything(agents, [chosen.node], coordinator=True)
        return snapshot, chosen, found

    snapshot, chosen, found = cluster.run(ask)
    return _show(cluster, explain_node.fault(snapshot, chosen, found))


def _show(cluster: Cluster, answer: Explanation) -> ExitCode:
    from ftctl.render import document, tables
    from ftctl.render import why as view

    if cluster.output.for_machines:
        document.emit(cluster.world, cluster.output, view.document(answer))
    else:
        tables.show(cluster.world.console(), *view.parts(answer))
    return ExitCode.OK
