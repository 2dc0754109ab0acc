"""`ftctl version`."""

from __future__ import annotations

import typer

from ftctl.context import current

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("ftctl")
    except PackageNotFoundError:
        number = "unknown (not installed: running from source)"
    current().out(f"ftctl {number}")
