"""`ftctl version`."""

from __future__ import annotations

from ftctl.context import current
from ftctl.options import OutputOption, plain_app

app = plain_app()


@app.command()
def version(output: OutputOption = None) -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("ftctl")
    except PackageNotFoundError:
        number = "unknown (not installed: running from source)"
    world = current()
    if output is not None or world.environ.get("FTCTL_OUTPUT"):
        from ftctl.config import output_only
        from ftctl.render.document import emit

        chosen = output_only(world, output)
        if chosen.for_machines:
            emit(world, chosen, {"schema": 1, "version": number})
            return
    world.out(f"ftctl {number}")
