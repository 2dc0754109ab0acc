"""What a fork server has imported, so that its children need not; and whether it is still what stands on disk."""

from __future__ import annotations

import importlib
import os
import sys
import time


class Preloaded:
    """Imports at once. What cannot be imported is a problem of the children that need it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        before = time.monotonic()
        problems: list[str] = []
        for name in names:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything while it is imported
                problems.append(f"{name}: {type(error).__name__}: {error}")
        self.names = names
        self.problems = tuple(problems)
        self.seconds = time.monotonic() - before
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        self._sources = {file: _stamp(file) for file in files if isinstance(file, str)}

    def edited(self) -> str:
        """A file that is not any more what was imported; empty if there is none."""
        return next((file for file, stamp in self._sources.items() if _stamp(file) != stamp), "")


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
