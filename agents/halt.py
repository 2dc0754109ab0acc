"""Are faults halted on this node? In memory for every injection, and on disk, so that a restart forgets nothing.

Memory comes first: from then on nothing is injected, whatever the disk does. A record that cannot be read counts as a
halt: a fault that somebody forbade costs more than asking once whether it is still meant so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.api.halt import HaltView
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


class Halt:
    """`emit(kind, object, reason)` hears faults.halted and faults.allowed. `hold` never blocks."""

    def __init__(self, path: Path, node: str, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._node = node
        self._emit = emit
        self._clock = clock
        self._disk = threading.Lock()
        self._view = _read(path)

    def view(self) -> HaltView | None:
        return self._view

    def why(self) -> str:
        """The sentence that a refusal gives; empty where faults are allowed."""
        view = self._view
        if view is None:
            return ""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(view.since))
        return f"faults are halted on {self._node} by {view.by} since {since}: {view.reason}"

    def hold(self, by: str, reason: str) -> tuple[bool, HaltView]:
        """From now on nothing is injected. Whether this call did it, and the halt that stands; `save` must follow."""
        before = self._view
        if before is not None:
            return False, before
        view = HaltView(by=by, reason=" ".join(reason.split())[:MAX_REASON], since=self._clock())
        self._view = view
        self._emit("faults.halted", self._node, f"by {by}: {view.reason}")
        return True, view

    def save(self, view: HaltView) -> None:
        """On disk when it returns; it stands even if somebody allowed faults meanwhile. Raises ApiProblem: then it
        holds until the agent ends."""
        with self._disk:
            if self._view is None:
                self._view = view
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_record(self._path, _Record(self._view.by, self._view.reason, self._view.since))
            except OSError as error:
                reason = f"halted, but only until its agent ends: {_words(error)}"
                hint = "make room on its disk, then halt again"
                raise ApiProblem("failed", f"faults of {self._node}", reason, hint) from None

    def clear(self, by: str, reason: str) -> bool:
        """Whether there was one. Raises ApiProblem, and then it still stands."""
        with self._disk:
            if self._view is None:
                return False
            try:
                self._path.unlink(missing_ok=True)
                _sync(self._path.parent)
            except OSError as error:
                text = f"still halted: {_words(error)}"
                raise ApiProblem("failed", f"faults of {self._node}", text, f"remove {self._path} there") from None
            self._view = None
        self._emit("faults.allowed", self._node, f"by {by}: {' '.join(reason.split())[:MAX_REASON]}")
        return True


def _read(path: Path) -> HaltView | None:
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=_Record)
    except FileNotFoundError:
        return None
    except OSError as error:
        return HaltView(by="unknown", reason=f"the record cannot be read: {_words(error)}", since=_age(path))
    except (msgspec.DecodeError, ValueError):
        return HaltView(by="unknown", reason=f"the record {path} is damaged", since=_age(path))
    return HaltView(by=record.by, reason=record.reason, since=record.since)


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
