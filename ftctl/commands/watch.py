"""`ftctl watch`: the cluster, live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster

if TYPE_CHECKING:
    from ftctl.client.cluster import Agents, Cluster

app = plain_app()

LEAST_S = 0.2  # between two looks
DRAWN_EVERY_S = 0.1  # at most, whatever happens


@app.command()
@with_cluster
def watch(
    cluster: Cluster,
    interval: Annotated[str, typer.Option(metavar="TIME", help="How often the agents are asked.")] = "1s",
) -> ExitCode | None:
    """Watch replicas, rails, faults, throughput and events on one screen; q ends.

    Green is well, yellow is passing or done on purpose, red needs hands. What goes away, an agent or coordinator, is
    shown with the time since when. Exit code 0 after q, 130 after Ctrl-C, 2 where stdout is no terminal.
    """
    from ftctl import durations
    from ftctl.errors import UsageProblem

    try:
        interval_s = max(LEAST_S, durations.parse(interval))
    except durations.DurationError as error:
        raise UsageProblem("--interval", str(error)) from None
    hint = "ftctl status --watch (also with -o json), or ftctl events -f"
    if cluster.output.for_machines:
        raise UsageProblem(f"-o {cluster.output.value}", "watch is a screen for people", hint)
    if not cluster.world.stdout.isatty():
        raise UsageProblem("ftctl watch", "stdout is no terminal", hint)

    async def live(agents: Agents) -> ExitCode:
        return await _live(cluster, agents, interval_s)

    return cluster.run(live)


async def _live(cluster: Cluster, agents: Agents, interval_s: float) -> ExitCode:
    import asyncio
    import signal

    from rich.live import Live

    from ftctl import terminal
    from ftctl.client import events as source
    from ftctl.client.watching import Picture
    from ftctl.errors import CliError
    from ftctl.render.watch import Screen

    world = cluster.world
    picture = Picture()
    picture.see(await agents.snapshot())  # a token that nobody knows ends here, in one line
    loop = asyncio.get_running_loop()
    draw, leave = asyncio.Event(), asyncio.Event()

    async def look() -> None:
        while True:
            await world.sleep(interval_s)
            try:
                picture.see(await agents.snapshot())
            except CliError as error:
                picture.missed(str(error))
            draw.set()

    def heard(event: object) -> None:
        picture.heard(event)  # type: ignore[arg-type]
        draw.set()

    def typed(handle: int) -> None:
        if set(terminal.keys(handle)) & set("qQ"):
            leave.set()

    async def follow() -> None:
        nodes = [node.name for node in cluster.inventory.nodes]
        since = world.unix_time() - 600
        # Who does not answer is on the screen; a line beside it would break it.
        await source.follow(agents, nodes, heard, coordinator=True, since=since, say=lambda _text: None)

    with (
        terminal.single_keys(world.stdin) as handle,
        Live(
            console=world.console(), screen=True, auto_refresh=False, redirect_stderr=False, redirect_stdout=False
        ) as screen,
    ):
        if handle is not None:
            loop.add_reader(handle, typed, handle)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, leave.set)
        loop.add_signal_handler(signal.SIGWINCH, draw.set)
        tasks = [asyncio.create_task(work()) for work in (look, follow)]
        leaving = asyncio.create_task(leave.wait())
        try:
            while not leave.is_set():
                draw.clear()
                screen.update(Screen(picture, world.unix_time()), refresh=True)
                await asyncio.sleep(DRAWN_EVERY_S)
                changed = asyncio.create_task(draw.wait())
                waited: list[asyncio.Task[Any]] = [changed, leaving, *tasks]
                await asyncio.wait(waited, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            leaving.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)
            if handle is not None:
                loop.remove_reader(handle)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
                loop.remove_signal_handler(number)
    return ExitCode.OK
