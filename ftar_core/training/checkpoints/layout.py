"""What lies in a checkpoint directory, and which of it counts.

    DIRECTORY/
      history                   which beginning of the job it is that runs (histories.py)
      lock                      who the directory belongs to; held (flock) by every replica of the job that runs
      step-000000400/           complete: it got this name when everything in it was on disk
        .metadata, __R_N.distcp   torch.distributed.checkpoint's own files, one or more a rank
        ftar.state                the tree of plain values, without tensors
        ftar.json                 the manifest: who made it when, and size and SHA-256 of each file
      .step-000000500.r1.7.part/  being written by incarnation 7 of r1; removed by the next writer if that one is dead

A directory with another name is nobody's business here. What is complete is told by name and manifest alone, sizes
included; that its bytes are right is told by the digests, where they are read (reading.py). One that was found wrong
then has a file `damaged` with the reason in it, and is passed by from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from ftar_core.errors import CheckpointError

UNKNOWN = -1  # history
SCHEMA = 2  # 1 had no history
MANIFEST, TREE, METADATA, DAMAGED = "ftar.json", "ftar.state", ".metadata", "damaged"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_COMPLETE = re.compile(r"step-(\d{9,18})\Z")
_PART = re.compile(r"\.step-(\d{9,18})\.([a-z0-9][a-z0-9._-]*)\.(\d+)\.part\Z")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`step`: the state is that after this one, which `contributors` made in (`term`, `epoch`) of the job's `history`
    (histories.py). `written`: Unix seconds, for people. `data`: which batches are trained. `rng`: what is kept of
    random generators, in words."""

    schema: int = SCHEMA
    ftar_core: str
    torch: str
    job: str
    step: int
    term: int
    epoch: int
    contributors: tuple[str, ...]
    replica: str  # that wrote it
    ranks: int
    written: float
    seconds: float  # it took from the end of the step until everything was on disk
    data: dict[str, bool | int | str | list[int] | None]
    rng: str
    files: dict[str, FileEntry]
    history: int = 0

    @property
    def nbytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


class _Schema(msgspec.Struct, frozen=True):
    """The part that every version can read."""

    schema: int
    ftar_core: str = "?"
    history: int = 0


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, or one that must be passed by (`problem`), or whose job must not go on with an older one
    (`refused`)."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str = ""
    history: int = 0
    refused: CheckpointError | None = None

    @property
    def loadable(self) -> bool:
        """As far as can be told without reading its data."""
        return self.manifest is not None


def complete_name(step: int) -> str:
    return f"step-{step:09d}"


def part_name(step: int, replica: str, incarnation: int) -> str:
    return f".step-{step:09d}.{replica}.{incarnation}.part"


def step_of(name: str) -> int | None:
    """Of a directory that is complete, by its name."""
    found = _COMPLETE.match(name)
    return int(found[1]) if found else None


def part_of(name: str) -> tuple[int, str, int] | None:
    """(step, replica, incarnation) of one that is being written."""
    found = _PART.match(name)
    return (int(found[1]), found[2], int(found[3])) if found else None


def steps_in(directory: Path) -> list[int]:
    """Of all complete ones, ascending. Raises OSError (not for a directory that is not there)."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(step for name in names if (step := step_of(name)) is not None)


def look(directory: Path, step: int) -> Found:
    """Whether that checkpoint may be loaded, without reading its data. Raises CheckpointError if it was made by a newer
    version: falling back to an older one would throw away training without anybody being asked."""
    found = glance(directory / complete_name(step), step)
    if found.refused is not None:
        raise found.refused
    return found


def survey(directory: Path) -> list[Found]:
    """All complete ones, the newest last: by history, then by step. Whose manifest cannot be read may be of the last
    history: that it is passed by is said then. Raises OSError (not for a directory that is not there)."""
    found = [glance(directory / complete_name(step), step) for step in steps_in(directory)]
    last = max([0, *(one.history for one in found)])
    found = [replace(one, history=last) if one.history == UNKNOWN else one for one in found]
    return sorted(found, key=lambda one: (one.history, one.step))


def glance(path: Path, step: int) -> Found:
    """`look`, for who decides about it otherwise."""
    history = UNKNOWN
    try:
        manifest = read_manifest(path)
        history = manifest.history
        if (path / DAMAGED).exists():
            return Found(path, step, None, _first_line(path / DAMAGED), history)
    except OSError as error:
        return Found(path, step, None, f"{MANIFEST}: {error.strerror}", history)
    except ValueError as error:
        return Found(path, step, None, f"{MANIFEST}: {error}", history)
    except NewerVersion as error:
        return Found(path, step, None, str(error), error.history, error)
    if manifest.step != step:
        return Found(path, step, None, f"its manifest is of step {manifest.step}", history)
    for name, entry in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return Found(path, step, None, f"{name}: {error.strerror}", history)
        if size != entry.bytes:
            problem = f"{name} has {size} bytes of {entry.bytes}: it was cut short"
            return Found(path, step, None, problem, history)
    return Found(path, step, manifest, "", history)


class NewerVersion(CheckpointError):
    """`history`: of what it made."""

    history = 0


def read_manifest(path: Path) -> Manifest:
    """Raises OSError, ValueError (not a manifest), NewerVersion."""
    with (path / MANIFEST).open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(f"longer than {MAX_MANIFEST_BYTES} bytes")
    try:
        made = msgspec.json.decode(text, type=_Schema)
        if made.schema > SCHEMA:
            error = NewerVersion(
                f"checkpoint {path} was made by ftar_core {made.ftar_core} (schema {made.schema}), this one reads "
                f"schema {SCHEMA}",
                hint=f"install ftar_core {made.ftar_core} or newer, or move that checkpoint away to use an older one",
            )
            error.history = made.history
            raise error
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    for name in manifest.files:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not a file's name")
    if METADATA not in manifest.files or TREE not in manifest.files:
        raise ValueError(f"{METADATA} or {TREE} is missing")
    return manifest


def verify(path: Path, name: str, entry: FileEntry) -> str:
    """What is wrong with a file; empty if nothing. Reads all of it."""
    try:
        with (path / name).open("rb") as file:
            found = _sha256(file)
    except OSError as error:
        return f"{name}: {error.strerror}"
    return (
        "" if found == entry.sha256 else f"{name} has the SHA-256 {found[:12]}..., {entry.sha256[:12]}... was written"
    )


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1024 * 1024):
        digest.update(block)
    return digest.hexdigest()


def entry_of(path: Path) -> FileEntry:
    """Of a file that was just written: what is read back is what counts."""
    with path.open("rb") as file:
        return FileEntry(os.fstat(file.fileno()).st_size, _sha256(file))


def mark_damaged(path: Path, problem: str) -> None:
    """Nobody tries it again. Where it cannot be written down, everybody finds out for himself."""
    with contextlib.suppress(OSError):
        (path / DAMAGED).write_text(problem + "\n")


def sync(path: Path) -> None:
    """fsync(2) of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(path: Path) -> str:
    text = path.read_bytes()[:500].decode(errors="replace").strip()
    return text.splitlines()[0] if text else "marked as damaged"
