"""The report files that a command was asked for: whether they can be made is known before an experiment begins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftctl.context import World
from ftctl.errors import CliError, UsageProblem
from ftctl.report import html, junit, markdown
from ftctl.report.reading import Run, read_run


@dataclass(frozen=True)
class Files:
    junit: Path | None = None
    html: Path | None = None
    markdown: Path | None = None

    def _wanted(self) -> list[tuple[Path, Callable[[Sequence[Run]], str]]]:
        pairs = ((self.junit, junit.render), (self.markdown, markdown.render), (self.html, html.render))
        return [(path, render) for path, render in pairs if path is not None]

    def check(self, world: World) -> None:
        """Raises UsageProblem: minutes of experiments for a report that cannot be written are lost."""
        for path, _ in self._wanted():
            target = world.cwd / path.expanduser()
            if not target.parent.is_dir():
                raise UsageProblem(str(path), "its directory is not there")
            if target.is_dir():
                raise UsageProblem(str(path), "is a directory, and a file is to be written", f"{path}/NAME")
            if not os.access(target if target.exists() else target.parent, os.W_OK):
                raise UsageProblem(str(path), "may not be written")
        if self.html is not None and importlib.util.find_spec("jinja2") is None:
            raise UsageProblem("--html", "jinja2 is not installed", "pip install 'ftctl[report]'")

    def write(self, world: World, directories: Sequence[Path]) -> list[CliError]:
        """All that can be written are; the errors name the others. Raises UsageProblem for what is no run."""
        wanted = self._wanted()
        runs = [read_run(directory) for directory in directories] if wanted else []
        errors: list[CliError] = []
        for path, render in wanted:
            try:
                (world.cwd / path.expanduser()).write_text(render(runs), encoding="utf-8")
            except OSError as error:
                errors.append(CliError(str(path), error.strerror or str(error)))
            except CliError as error:
                errors.append(error)
            else:
                world.say(f"written: {path}")
        return errors
