"""Takes a lab down, in whatever state it is: running, half built, crashed, or nothing but a directory.

First the processes (found by the uuid in their environment), and with the last of them the kernel removes namespaces,
links and addresses by itself. Then the directories. The manifest goes last, so that a teardown that is itself killed
can be done again.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftctl.lab.manifest import Manifest, ManifestError, load_manifest
from ftctl.lab.paths import LabPaths
from ftctl.lab.processes import Found, end_all

# Time for agents to close their ledgers and for ranks to say that they leave; all of it is thrown away right after.
GRACE_S = 2.0
_RUNTIME_NAME = re.compile(r"ftctl-\d+-[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class Leftovers:
    """What could not be removed; empty after a clean teardown."""

    processes: tuple[Found, ...] = ()
    paths: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [f"process {found.pid} ({found.argv})" for found in self.processes] + list(self.paths)


def take_down(paths: LabPaths, grace_s: float = GRACE_S) -> Leftovers:
    """Remove the lab in this directory. Does nothing, successfully, if there is none.

    Raises ManifestError if the manifest is damaged: whose processes to end is then not known.
    """
    try:
        manifest: Manifest | None = load_manifest(paths.manifest)
    except ManifestError:
        if paths.manifest.exists():
            raise
        manifest = None  # killed between making the directory and writing the manifest: nothing was started yet
    if manifest is None:
        return Leftovers(paths=_remove_tree(paths.root))
    processes = end_all(manifest.uuid, grace_s)
    left = [*_remove_runtime(Path(manifest.runtime_dir))]
    if not processes and not left:
        left += _remove_tree(paths.root, last=paths.manifest)
    return Leftovers(tuple(processes), tuple(left))


def _remove_runtime(path: Path) -> tuple[str, ...]:
    """Only a directory that is named as ours are, is a real directory, and is ours."""
    try:
        found = path.lstat()
    except OSError:
        return ()
    if not _RUNTIME_NAME.match(path.name) or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return ()
    return _remove_tree(path)


def _remove_tree(root: Path, last: Path | None = None) -> tuple[str, ...]:
    if last is not None and root.is_dir():
        for entry in root.iterdir():
            if entry != last:
                _remove_entry(entry)
    _remove_entry(root)
    return (str(root),) if os.path.lexists(root) else ()


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
