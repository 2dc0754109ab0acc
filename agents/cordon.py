"""Is this node set apart? In memory for everybody who asks, and on disk, so that an agent's restart forgets nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents import standing
from agents.api.cordon import CordonView
from agents.because import NOTHING, Because, Emit, tell
from agents.problems import ApiProblem


class Cordon:
    """Thread-safe. `emit(kind, object, reason)` hears node.cordoned and node.uncordoned."""

    def __init__(self, path: Path | None, node: str, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._node = node
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._view = standing.read(path, CordonView)

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

    def set(
        self, by: str, reason: str, *, dry_run: bool = False, because: Because = NOTHING
    ) -> tuple[bool, CordonView]:
        """Whether this call did it, and the cordon that stands. On disk when it returns. Raises ApiProblem."""
        reason = standing.one_line(reason)
        with self._lock:
            if self._view is not None:
                return False, self._view
            view = CordonView(by=by, reason=reason, since=self._clock())
            if dry_run:
                return True, view
            try:
                standing.write(self._path, by, reason, view.since)
            except OSError as error:
                hint = "make room on its disk, then do it again"
                why = f"not cordoned: {standing.words(error)}"
                raise ApiProblem("failed", f"node {self._node}", why, hint) from None
            self._view = view
        tell(self._emit, "node.cordoned", self._node, f"by {by}: {reason}", because)
        return True, view

    def clear(self, by: str, reason: str, *, dry_run: bool = False, because: Because = NOTHING) -> bool:
        """Whether there was one. Raises ApiProblem, and then it still stands."""
        reason = standing.one_line(reason)
        with self._lock:
            before = self._view
            if before is None:
                return False
            if dry_run:
                return True
            try:
                standing.remove(self._path)
            except OSError as error:
                reason = f"still cordoned: {standing.words(error)}"
                raise ApiProblem("failed", f"node {self._node}", reason, f"remove {self._path} there") from None
            self._view = None
        tell(self._emit, "node.uncordoned", self._node, f"by {by}: {reason}" if reason else f"by {by}", because)
        return True
