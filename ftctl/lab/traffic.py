"""What the ranks of a lab's NCCL job have moved and checked (ftar_core.ncclrun writes it)."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from ftctl.lab.manifest import ManifestError, load
from ftctl.lab.paths import LabPaths


class Traffic(msgspec.Struct, frozen=True):
    """What a rank of ftar_core.ncclrun reports."""

    rank: int
    pid: int
    state: str
    time: float
    rounds: int
    messages_sent: int
    bytes_sent: int
    messages_checked: int
    bytes_checked: int
    bytes_wrong: int
    first_wrong: str
    longest_ms: float


def reports(paths: LabPaths) -> list[tuple[str, Traffic]]:
    """Of a lab's NCCL ranks, by node; those that cannot be read are left out."""
    found = []
    for path in sorted(paths.journal.glob("*.json")):
        with suppress(ManifestError):
            found.append((path.stem, load(path, Traffic)))
    return sorted(found, key=lambda one: one[1].rank)
