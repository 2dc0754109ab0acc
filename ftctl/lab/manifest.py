"""The files by which the CLI and the keeper of a lab talk: what the lab is, what to run, and how it goes.

`lab.json` is written before anything else is made and says how to find all of it again: the uuid that every process of
the lab carries in its environment, and the directory of its sockets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from ftctl.lab.layout import LabOptions
from ftctl.lab.paths import write_private

FORMAT = 1
MARKER = "FTCTL_LAB_ID"  # environment variable of every process of a lab; its value is the lab's uuid


class ManifestError(Exception):
    """A file of the lab is missing or damaged; the message names it and the reason."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    uuid: str
    runtime_dir: str
    options: LabOptions
    created: float  # unix seconds
    version: str = ""  # of ftctl
    format: int = FORMAT


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that the keeper runs in a namespace (`fabric` or a node's name) and starts again when it ends.

    `final_codes` are exit codes after which it stays down: the work is done, or starting again will not help.
    """

    name: str
    namespace: str
    argv: tuple[str, ...]
    log: str
    env: dict[str, str] = {}
    final_codes: tuple[int, ...] = ()


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """state: running | waiting (to start again) | ended (by a final code)"""

    name: str
    namespace: str
    state: str
    pid: int = 0
    restarts: int = 0
    exit_code: int | None = None  # of the last life; negative: killed by that signal
    log: str = ""


class KeeperState(msgspec.Struct, frozen=True, kw_only=True):
    """phase: building | running | failed | stopping"""

    pid: int
    phase: str
    error: str = ""
    hint: str = ""
    namespaces: dict[str, int] = {}  # name -> file descriptor in the keeper
    children: tuple[ChildState, ...] = ()


T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """Read one of these files. Raises ManifestError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ManifestError(f"{path} is damaged: {error}") from None


def save(path: Path, value: object) -> None:
    """Write one of these files, 0600, atomically. Raises OSError."""
    write_private(path, msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def load_manifest(path: Path) -> Manifest:
    """Raises ManifestError, also for a manifest of another format."""
    manifest = load(path, Manifest)
    if manifest.format != FORMAT:
        raise ManifestError(f"{path} is of format {manifest.format}; this ftctl knows {FORMAT}")
    return manifest
