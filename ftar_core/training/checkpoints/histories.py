"""Which of a job's histories a checkpoint belongs to, so that "the newest" is what was trained last.

A job that goes on from a checkpoint makes the steps behind it again, with other replicas and other batches: from there
on they are another history, and a checkpoint of a higher step may be of the one that was given up. It may even be
written later than those that count, by a replica that was frozen meanwhile. (Term and epoch would tell the two apart,
but begin anew with a new store.) So each beginning of a job in its directory has a number, in every manifest and, of
the one that runs, in the file `history`. Checkpoints are ordered by (history, step); an older history takes no place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ftar_core.training.checkpoints.layout import Found, sync

FILE = "history"
MOST_DIGITS = 15


def running(directory: Path) -> int:
    """Of the job that has begun last there; 0: none has. What cannot be read counts as 0: manifests say it, too."""
    try:
        with (directory / FILE).open("rb") as file:
            text = file.read(2 * MOST_DIGITS).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and len(text) <= MOST_DIGITS else 0


def following(directory: Path, complete: Sequence[Found]) -> int:
    """That of a job which begins there now. `complete`: what it finds (layout.survey)."""
    return 1 + max([running(directory), *(found.history for found in complete)])


def begin(directory: Path, number: int) -> None:
    """All replicas that begin together say the same. Raises OSError."""
    if running(directory) >= number:
        return
    temporary = directory / f".{FILE}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            file.write(b"%d\n" % number)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / FILE)
        sync(directory)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def stands(found: Found | None, history: int) -> bool:
    """A complete checkpoint takes the place of one of `history` and of the same step."""
    if found is None or found.refused is not None:  # of a newer version: not ours to replace
        return found is not None
    return found.loadable and found.history >= history
