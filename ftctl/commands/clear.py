"""`ftctl clear nic|rdma|gpu|nvswitch NODE/PART`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster

app = plain_group("Forget what was wrong with a part, because somebody has seen to it.")
EXAMPLES = {"nic": "rail0", "rdma": "mlx5_0/1"}
Part = Annotated[str, typer.Argument(metavar="NODE/PART", help="node1/rail0, node1/gpu3, node1/mlx5_0/1.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why (required); shown in the events.")]


@app.command()
@with_cluster
def nic(cluster: Cluster, part: Part, *, reason: Reason) -> ExitCode | None:
    """Forget what was wrong with a NIC. What is still wrong is found again at the next look."""
    return _clear(cluster, "nic", part, reason)


@app.command()
@with_cluster
def rdma(cluster: Cluster, part: Part, *, reason: Reason) -> ExitCode | None:
    """Forget what was wrong with an RDMA port (node1/mlx5_0/1). What is still wrong is found again at the next look."""
    return _clear(cluster, "rdma", part, reason)


@app.command()
@with_cluster
def gpu(cluster: Cluster, part: Part, *, reason: Reason) -> ExitCode | None:
    """Forget what was wrong with a GPU. What is still wrong is found again at the next look."""
    return _clear(cluster, "gpu", part, reason)


@app.command()
@with_cluster
def nvswitch(cluster: Cluster, part: Part, *, reason: Reason) -> ExitCode | None:
    """Forget what was wrong with an NVSwitch. What is still wrong is found again at the next look."""
    return _clear(cluster, "nvswitch", part, reason)


def _clear(cluster: Cluster, kind: str, part: str, reason: str) -> ExitCode:
    from agents.api.health import ClearAnswer, ClearRequest
    from ftctl.client.cluster import Agents
    from ftctl.errors import UsageProblem
    from ftctl.render import document

    node, _, name = part.partition("/")
    if kind in ("gpu", "nvswitch") and name.startswith(kind):
        name = name.removeprefix(kind).strip()
    if not name or len(name) > 50:
        raise UsageProblem(part, "not of the form NODE/PART", f"ftctl clear {kind} node1/{EXAMPLES.get(kind, '3')}")
    if not reason.strip():
        raise UsageProblem("--reason", f"clear {kind} needs a reason, and it is empty")
    target = cluster.inventory.node(node).name
    wish = ClearRequest(kind=kind, object=name, reason=reason[:500])

    async def ask(agents: Agents) -> ClearAnswer:
        return await (await agents.client(target)).clear(wish)

    answer = cluster.run(ask)
    if cluster.output.for_machines:
        whole: document.Document = {"schema": document.SCHEMA, "cleared": answer.cleared, "text": answer.text}
        document.emit(cluster.world, cluster.output, whole)
    else:
        cluster.world.say(answer.text)
    return ExitCode.OK
