"""`ftctl status`: the whole cluster on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import OutputFormat, plain_app, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster, Snapshot

app = plain_app()


@app.command()
@with_cluster
def status(
    cluster: Cluster,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen, live, until Ctrl-C.")] = False,
    interval: Annotated[str, typer.Option(metavar="TIME", help="How often --watch looks.")] = "1s",
    problems: Annotated[bool, typer.Option("--problems", help="Only what is wrong, why, and what to do.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All NICs, all stalls, and faults already reverted.")] = False,
) -> ExitCode | None:
    """Show nodes, rails, replicas, stalls, faults, and what to do next.

    Exit code 0: healthy, or the only deviations were made on purpose (injected, drained) or are passing (catching up).
    1: something is wrong. 5: a fault could not be taken back. 6: an agent did not answer.
    """
    if watch:
        return _watch(cluster, interval, problems, every)
    from ftctl.client.problems import find, verdict

    snapshot = cluster.snapshot()
    _print(cluster, snapshot, problems, every)
    return verdict(find(snapshot))


def _print(cluster: Cluster, snapshot: Snapshot, problems: bool, every: bool) -> None:
    from ftctl.client.problems import find
    from ftctl.render import document, tables
    from ftctl.render import status as view

    found = find(snapshot)
    if cluster.output.for_machines:
        whole = document.status(snapshot, found)
        if problems:
            whole = {key: whole[key] for key in ("schema", "time", "problems", "recommended")}
        document.emit(cluster.world, cluster.output, whole)
        return
    wide = cluster.output is OutputFormat.WIDE
    parts = view.problems_only(found) if problems else view.status(snapshot, found, wide=wide, every=every)
    tables.show(cluster.world.console(), *parts)


def _watch(cluster: Cluster, interval: str, problems: bool, every: bool) -> ExitCode:
    """Live on a terminal; elsewhere one page (or one JSON line) after the other."""
    from ftctl import durations
    from ftctl.client.cluster import Agents
    from ftctl.client.problems import find
    from ftctl.errors import UsageProblem
    from ftctl.render import document
    from ftctl.render import status as view

    try:
        interval_s = max(0.1, durations.parse(interval))
    except durations.DurationError as error:
        raise UsageProblem("--interval", str(error)) from None
    world = cluster.world
    live = not cluster.output.for_machines and world.stdout.isatty()

    async def follow(agents: Agents) -> ExitCode:
        if not live:
            while True:
                snapshot = await agents.snapshot()
                if cluster.output is OutputFormat.JSON:
                    world.out(document.as_line(document.status(snapshot, find(snapshot))))
                else:
                    _print(cluster, snapshot, problems, every)
                    world.out()
                await world.sleep(interval_s)
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        with Live(console=world.console(), screen=True, auto_refresh=False) as screen:
            while True:
                snapshot = await agents.snapshot()
                found = find(snapshot)
                wide = cluster.output is OutputFormat.WIDE
                parts = view.problems_only(found) if problems else view.status(snapshot, found, wide=wide, every=every)
                spaced = [item for part in parts for item in (part, Text())]
                screen.update(Group(*spaced, Text("Ctrl-C ends", style="dim")), refresh=True)
                await world.sleep(interval_s)

    return cluster.run(follow)
