"""ftctl's outside world as one object: streams, environment, clock, files that are looked up, agents, running labs.

Commands take everything from `current()`; a test puts another World in its place and needs no patching. Whatever is
costly to import (rich, the lab) is imported by the method that needs it, so that `ftctl --help` stays quick.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ftctl.plain import harmless

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

T = TypeVar("T")


@dataclass(frozen=True)
class LabEntry:
    """A lab that runs on this machine, and the inventory file it wrote."""

    name: str
    inventory: Path


def _cwd() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed, or may not be read: then there is no ./ftctl.yaml either
        return Path("/")


def _user_config() -> Path:
    from platformdirs import user_config_path

    return user_config_path("ftctl") / "ftctl.yaml"


def _running_labs() -> list[LabEntry]:
    from ftctl.lab import registry

    return [LabEntry(lab.name, lab.inventory) for lab in registry.list_labs() if lab.alive]


async def _sleep(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


@dataclass
class World:
    """`whole_process`: this command line is all that the process is for, and it may ignore signals until its end."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    stdin: TextIO = field(default_factory=lambda: sys.stdin)
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    cwd: Path = field(default_factory=_cwd)
    user_config: Callable[[], Path] = _user_config
    running_labs: Callable[[], list[LabEntry]] = _running_labs
    unix_time: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = _sleep
    whole_process: bool = False

    def out(self, text: str = "") -> None:
        """Data, to stdout."""
        print(text, file=self.stdout, flush=True)

    def say(self, text: str) -> None:
        """Talk, to stderr. Other people's words are in it."""
        print(harmless(text), file=self.stderr, flush=True)

    def can_ask(self) -> bool:
        """True when a person is there to answer a question."""
        return self.stdin.isatty() and self.stderr.isatty()

    def ask(self, question: str) -> bool:
        """A yes-or-no question on stderr; anything but y or yes is no."""
        print(f"{question} [y/N] ", end="", file=self.stderr, flush=True)
        return self.stdin.readline().strip().lower() in ("y", "yes")

    def console(self) -> Console:
        """A rich console on stdout. Colours only on a terminal and without NO_COLOR; piped tables are not wrapped."""
        from rich.console import Console

        terminal = self.stdout.isatty()
        colour = terminal and not self.environ.get("NO_COLOR") and self.environ.get("TERM") != "dumb"
        return Console(
            file=self.stdout,
            force_terminal=terminal,
            color_system="auto" if colour else None,
            no_color=not colour,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=not terminal,
            width=None if terminal else 200,
            _environ=self.environ,
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out asynchronous work; Ctrl-C cancels it and raises KeyboardInterrupt."""
        import asyncio

        # Not as the task's own result: at its end asyncio looks at the handler of SIGINT, whose repr holds the task's,
        # and so the result's. That is a second for the views of a thousand nodes.
        result: list[T] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(_loop_trouble)
            result.append(await work)

        asyncio.run(watched())
        return result[0]


def _loop_trouble(loop: asyncio.AbstractEventLoop, found: dict[str, Any]) -> None:
    """anyio's Unix sockets set the result of a wait that Ctrl-C has just cancelled: no reason for a traceback."""
    import asyncio

    if not isinstance(found.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(found)


_current: ContextVar[World | None] = ContextVar("ftctl_world", default=None)


def current() -> World:
    world = _current.get()
    return world if world is not None else World()


@contextmanager
def active(world: World) -> Iterator[World]:
    """Make `world` the current one for the duration."""
    mark = _current.set(world)
    try:
        yield world
    finally:
        _current.reset(mark)
