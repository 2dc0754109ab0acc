"""`ftctl bundle`: everything that an incident report needs, in one archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster

if TYPE_CHECKING:
    from rich.progress import Progress

    from ftctl.bundling import Bundle
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.context import World
    from ftctl.errors import CliError

app = plain_app()


@app.command()
@with_cluster
def bundle(
    cluster: Cluster,
    *,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="Events of the last 30s, 10m, 2h.")] = "1h",
    own_output: Annotated[
        Path | None,
        typer.Option("--file", "-o", metavar="FILE", help="Default: ftctl-bundle-JOB-TIME.tar.gz, here."),
    ] = None,
) -> ExitCode | None:
    """Write one archive for an incident report: status, events, faults, links, metrics, health and audit, versions.

    Tokens and keys are left out. manifest.json in it says what is there, from whom, and what could not be read and why.
    Exit code 6 when an agent did not answer: the archive is there, without what that one would have said.
    """
    import time

    from ftctl import bundling, durations
    from ftctl.errors import CliError, UsageProblem
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document

    world = cluster.world
    try:
        since_s = durations.parse(since)
    except durations.DurationError as error:
        raise UsageProblem("--since", str(error)) from None
    now = world.unix_time()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    root = f"ftctl-bundle-{cluster.inventory.job}-{stamp}"
    path = world.cwd / (own_output.expanduser() if own_output is not None else Path(f"{root}.tar.gz"))
    about: dict[str, object] = {"job": cluster.inventory.job, "time": now, "since_s": since_s, "ftctl": _version()}

    async def work(agents: Agents, packed: Bundle) -> list[CliError]:
        return await _fill(agents, packed, now - since_s)

    try:
        with bundling.opened(path, root, secrets=[cluster.inventory.token], now=now) as packed:
            errors = cluster.run(lambda agents: work(agents, packed))
            packed.finish(about)
    except FileExistsError:
        raise UsageProblem(f"-o {path}", "it is there already, and is not overwritten", "name another file") from None
    except OSError as error:
        where = error.filename or path
        raise CliError(
            f"bundle {path}", f"nothing was written: {where}: {error.strerror}", "-o FILE elsewhere"
        ) from None
    size = path.stat().st_size
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "file": str(path),
            "bytes": size,
            "files": [one.name for one in packed.packed],
            "missing": [{"what": one.what, "reason": one.reason} for one in packed.missing],
        }
        document.emit(world, cluster.output, whole)
    else:
        world.out(str(path))
        missing = f", {len(packed.missing)} could not be read or are not there" if packed.missing else ""
        world.say(
            f"{len(packed.packed)} files, {size / 1024:.0f} KiB{missing} (manifest.json in it says which and why)"
        )
    for problem in errors:
        world.say(f"error: {problem}")
    return most_urgent(problem.code for problem in errors)


async def _fill(agents: Agents, packed: Bundle, earliest: float) -> list[CliError]:
    from ftctl.client import gathering

    errors: dict[str, CliError] = {}
    total = gathering.steps(len(agents.inventory.nodes))
    with _progress(agents.world) as progress:
        task = progress.add_task("asking", total=total)
        async for piece in gathering.gather(agents, earliest, _version()):
            progress.update(task, advance=1, description=piece.name)
            if piece.text:
                packed.add(piece.name, piece.source, piece.text)
            if piece.error is not None:
                packed.miss(piece.name, piece.source, str(piece.error))
                errors.setdefault(str(piece.error), piece.error)
            elif piece.absent:
                packed.miss(piece.name, piece.source, piece.absent)
        progress.update(task, completed=total, description="written")
    return list(errors.values())


def _progress(world: World) -> Progress:
    """On stderr, and only where somebody looks; it leaves no line behind."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    shown = world.stderr.isatty()
    console = Console(file=world.stderr, force_terminal=shown, no_color=bool(world.environ.get("NO_COLOR")))
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not shown)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ftctl")
    except PackageNotFoundError:
        return "unknown"
