"""`ftctl status`: the whole cluster on one page."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import OutputFormat, plain_app, with_cluster

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

    from ftctl.client.cluster import Cluster, Snapshot
    from ftctl.render.document import Document

app = plain_app()


@app.command()
@with_cluster
def status(  # noqa: PLR0917
    cluster: Cluster,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen, live, until Ctrl-C.")] = False,
    interval: Annotated[str, typer.Option(metavar="TIME", help="How often --watch looks.")] = "1s",
    problems: Annotated[bool, typer.Option("--problems", help="Only what is wrong, why, and what to do.")] = False,
    accounting: Annotated[
        bool, typer.Option("--accounting", help="Only where the job's time went: effective training time and losses.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="All NICs, all stalls, and faults already reverted.")] = False,
) -> ExitCode | None:
    """Show nodes, rails, replicas, stalls, faults, and what to do next.

    Exit code 0: healthy, or the only deviations were made on purpose (injected, drained) or are passing (catching up).
    1: something is wrong. 5: a fault could not be taken back. 6: an agent did not answer.
    """
    only = Only("problems" if problems else "accounting" if accounting else "")
    if problems and accounting:
        from ftctl.errors import UsageProblem

        raise UsageProblem("--accounting", "not together with --problems: each is all that is shown")
    if watch:
        return _watch(cluster, interval, only, every)
    from ftctl.client.problems import find, verdict

    snapshot = cluster.snapshot()
    _print(cluster, snapshot, only, every)
    return verdict(find(snapshot))


class Only(str, Enum):
    """A part of the page that is asked for alone."""

    NOTHING = ""
    PROBLEMS = "problems"
    ACCOUNTING = "accounting"


def _print(cluster: Cluster, snapshot: Snapshot, only: Only, every: bool) -> None:
    from ftctl.render import document, tables

    if cluster.output.for_machines:
        document.emit(cluster.world, cluster.output, _document(snapshot, only))
        return
    tables.show(cluster.world.console(), *_parts(cluster, snapshot, only, every))


def _document(snapshot: Snapshot, only: Only) -> Document:
    from ftctl.client.problems import find
    from ftctl.render import document, shout

    whole = {**document.status(snapshot, find(snapshot)), "stuck": shout.documents(snapshot)}
    if only is Only.PROBLEMS:
        return {key: whole[key] for key in ("schema", "time", "stuck", "problems", "recommended")}
    if only is Only.ACCOUNTING:
        account = document.account(snapshot.job.accounting if snapshot.job is not None else None)
        return {"schema": whole["schema"], "time": whole["time"], "accounting": account}
    return whole


def _parts(cluster: Cluster, snapshot: Snapshot, only: Only, every: bool) -> list[ConsoleRenderable]:
    from ftctl.client.problems import find
    from ftctl.render import accounting, shout
    from ftctl.render import status as view

    loud = list(shout.parts(snapshot))
    if only is Only.PROBLEMS:
        return [*loud, *view.problems_only(find(snapshot))]
    if only is Only.ACCOUNTING:
        return accounting.parts(snapshot.job.accounting if snapshot.job is not None else None)
    return [*loud, *view.status(snapshot, find(snapshot), wide=cluster.output is OutputFormat.WIDE, every=every)]


def _watch(cluster: Cluster, interval: str, only: Only, every: bool) -> ExitCode:
    """Live on a terminal; elsewhere one page (or one JSON line) after the other."""
    from ftctl import durations
    from ftctl.client.cluster import Agents
    from ftctl.errors import UsageProblem
    from ftctl.render import document

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
                    world.out(document.as_line(_document(snapshot, only)))
                else:
                    _print(cluster, snapshot, only, every)
                    world.out()
                await world.sleep(interval_s)
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        from ftctl.render.tables import Harmless

        with Live(console=world.console(), screen=True, auto_refresh=False) as screen:
            while True:
                parts = _parts(cluster, await agents.snapshot(), only, every)
                spaced = [item for part in parts for item in (part, Text())]
                screen.update(Harmless(Group(*spaced, Text("Ctrl-C ends", style="dim"))), refresh=True)
                await world.sleep(interval_s)

    return cluster.run(follow)
