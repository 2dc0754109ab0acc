"""Which labs there are on this machine, for this user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftctl.lab.manifest import Manifest, ManifestError, load_manifest
from ftctl.lab.paths import LabPaths, labs_dir
from ftctl.lab.processes import living


@dataclass(frozen=True)
class LabInfo:
    """`alive`: at least one of its processes is. `manifest` None: it cannot be read, `problem` says why."""

    name: str
    dir: Path
    inventory: Path
    alive: bool
    manifest: Manifest | None = None
    problem: str = ""

    @property
    def paths(self) -> LabPaths:
        return LabPaths(self.dir)


def list_labs() -> list[LabInfo]:
    """Every lab that has a directory, by name; also dead and half-built ones (see `alive`)."""
    try:
        roots = sorted(entry for entry in labs_dir().iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError:
        return []
    found: list[tuple[LabPaths, Manifest | None, str]] = []
    for root in roots:
        paths = LabPaths(root)
        try:
            found.append((paths, load_manifest(paths.manifest), ""))
        except ManifestError as error:
            found.append((paths, None, str(error)))
    alive = living(manifest.uuid for _, manifest, _ in found if manifest is not None)
    return [
        LabInfo(
            paths.root.name,
            paths.root,
            paths.inventory,
            manifest is not None and manifest.uuid in alive,
            manifest,
            problem,
        )
        for paths, manifest, problem in found
    ]
