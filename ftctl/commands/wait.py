"""`ftctl wait replica R --for STATE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.commands.membership import ReplicaName
from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from agents.api.models import ReplicaState
    from ftctl.client.cluster import Agents, Cluster

app = plain_group("Wait until something has reached a state.")


@app.command()
@with_cluster
def replica(
    cluster: Cluster,
    name: ReplicaName,
    goal: Annotated[str, typer.Option("--for", metavar="STATE", help="A replica state, such as contributing.")],
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long to wait at most.")] = "60s",
) -> ExitCode | None:
    """Wait until a replica is in a state. Exit code 1 when it is not there in time."""
    from ftctl import durations
    from ftctl.client import replicas
    from ftctl.errors import UsageProblem
    from ftctl.render import document

    if goal not in replicas.STATES:
        raise UsageProblem("--for", f"{goal!r} is no state of a replica (they are {', '.join(replicas.STATES)})")
    try:
        timeout_s = durations.parse(timeout)
    except durations.DurationError as error:
        raise UsageProblem("--timeout", str(error)) from None
    world = cluster.world

    def changed(state: ReplicaState) -> None:
        if not cluster.output.for_machines:
            world.say(f"{state.name}: {state.state}" + (f" ({state.reason})" if state.reason else ""))
        if goal == "contributing" and state.state == "drained":
            world.say(f"it stays away until: ftctl rejoin replica {state.name}")

    async def work(agents: Agents) -> ReplicaState:
        known = (await agents.snapshot()).replica(name)
        return await replicas.until(
            agents, known, lambda state: state.state == goal, goal=goal, timeout_s=timeout_s, on_change=changed
        )

    state = cluster.run(work)
    if cluster.output.for_machines:
        whole: document.Document = {"schema": document.SCHEMA, "replica": state.model_dump(mode="json")}
        document.emit(world, cluster.output, whole)
    return ExitCode.OK
