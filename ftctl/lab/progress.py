"""Talk while a lab is made or a demo runs, on stderr: a line with a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ftctl.context import World

if TYPE_CHECKING:
    from rich.status import Status

# Without a terminal every change is a line in somebody's CI log: counters may change often, lines should not.
PLAIN_EVERY_S = 2.0


class Progress:
    """`now(text)` says what is being waited for; `done(text)` leaves a line for good, with the time it took."""

    def __init__(self, world: World, spinner: Status | None) -> None:
        self._world = world
        self._spinner = spinner
        self._start = world.monotonic()
        self._shown = ""
        self._shown_at = float("-inf")

    def now(self, text: str) -> None:
        if self._spinner is not None:
            self._spinner.update(text)
        elif text != self._shown and time.monotonic() - self._shown_at >= PLAIN_EVERY_S:
            self._world.say(f"  {text}")
            self._shown, self._shown_at = text, time.monotonic()

    def done(self, text: str) -> None:
        line = f"{self._world.monotonic() - self._start:6.1f} s  {text}"
        if self._spinner is not None:
            self._spinner.console.print(line, markup=False, highlight=False)
        else:
            self._world.say(line)


@contextmanager
def progress(world: World, first: str) -> Iterator[Progress]:
    """A Progress for the duration of a command; the spinner disappears with it."""
    if not world.stderr.isatty() or world.environ.get("TERM") == "dumb":
        yield Progress(world, None)
        return
    from rich.console import Console

    console = Console(file=world.stderr, no_color=bool(world.environ.get("NO_COLOR")), emoji=False)
    with console.status(first) as spinner:
        yield Progress(world, spinner)
