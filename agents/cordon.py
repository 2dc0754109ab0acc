"""Is this node set apart? In memory for everybody who asks, and on disk, so that an agent's restart forgets nothing.

A record that cannot be read counts as a cordon: starting a replica on a node that somebody set apart costs more than
asking once whether it is still meant so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.api.cordon import CordonView
from agents.problems import ApiProblem
from agents.recovery.records import write_record

MAX_RECORD_BYTES = 64 * 1024
MAX_REASON = 500

Emit = Callable[[str, str, str], None]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    by: str
    reason: str
    since: float
    version: int = 1


class Cordon:
    """Thread-safe. `emit(kind, object, reason)` hears node.cordoned and node.uncordoned."""

    def __init__(self, path: Path, node: str, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._node = node
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._view = _read(path)

    def view(self) -> CordonView | None:
        return self._view

    def why(self) -> str:
        """The sentence that a refusal gives; empty where there is no cordon."""
        view = self._view
        return f"{self._node} is cordoned by {view.by}: {view.reason}" if view is not None else ""

    def refuse(self, thing: str) -> None:
        """Raises ApiProblem while there is a cordon: `thing` would be started here."""
        if why := self.why():
            raise ApiProblem("refused", thing, why, f"ftctl uncordon node {self._node}")

    def set(self, by: str, reason: str, *, dry_run: bool = False) -> tuple[bool, CordonView]:
        """Whether this call did it, and the cordon that stands. On disk when it returns. Raises ApiProblem."""
        reason = " ".join(reason.split())[:MAX_REASON]
        with self._lock:
            if self._view is not None:
                return False, self._view
            view = CordonView(by=by, reason=reason, since=self._clock())
            if dry_run:
                return True, view
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_record(self._path, _Record(by, reason, view.since))
            except OSError as error:
                hint = "make room on its disk, then do it again"
                raise ApiProblem("failed", f"node {self._node}", f"not cordoned: {_words(error)}", hint) from None
            self._view = view
        self._emit("node.cordoned", self._node, f"by {by}: {reason}")
        return True, view

    def clear(self, by: str, reason: str, *, dry_run: bool = False) -> bool:
        """Whether there was one. Raises ApiProblem, and then it still stands."""
        reason = " ".join(reason.split())[:MAX_REASON]
        with self._lock:
            before = self._view
            if before is None:
                return False
            if dry_run:
                return True
            try:
                self._path.unlink(missing_ok=True)
                _sync(self._path.parent)
            except OSError as error:
                reason = f"still cordoned: {_words(error)}"
                raise ApiProblem("failed", f"node {self._node}", reason, f"remove {self._path} there") from None
            self._view = None
        self._emit("node.uncordoned", self._node, f"by {by}: {reason}" if reason else f"by {by}")
        return True


def _read(path: Path) -> CordonView | None:
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=_Record)
    except FileNotFoundError:
        return None
    except OSError as error:
        return CordonView(by="unknown", reason=f"its record cannot be read: {_words(error)}", since=_age(path))
    except (msgspec.DecodeError, ValueError):
        return CordonView(by="unknown", reason=f"its record {path} is damaged", since=_age(path))
    return CordonView(by=record.by, reason=record.reason, since=record.since)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
