"""Are faults halted on this node? In memory for every injection, and on disk, so that a restart forgets nothing.

Memory comes first: from then on nothing is injected, whatever the disk does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents import standing
from agents.api.halt import HaltView
from agents.problems import ApiProblem

Emit = Callable[[str, str, str], None]


class Halt:
    """`emit(kind, object, reason)` hears faults.halted and faults.allowed. `hold` never blocks."""

    def __init__(self, path: Path | None, node: str, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._node = node
        self._emit = emit
        self._clock = clock
        self._disk = threading.Lock()
        self._view = standing.read(path, HaltView)

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
        view = HaltView(by=by, reason=standing.one_line(reason), since=self._clock())
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
                standing.write(self._path, self._view.by, self._view.reason, self._view.since)
            except OSError as error:
                reason = f"halted, but only until its agent ends: {standing.words(error)}"
                hint = "make room on its disk, then halt again"
                raise ApiProblem("failed", f"faults of {self._node}", reason, hint) from None

    def clear(self, by: str, reason: str) -> bool:
        """Whether there was one. Raises ApiProblem, and then it still stands."""
        with self._disk:
            if self._view is None:
                return False
            try:
                standing.remove(self._path)
            except OSError as error:
                text = f"still halted: {standing.words(error)}"
                raise ApiProblem("failed", f"faults of {self._node}", text, f"remove {self._path} there") from None
            self._view = None
        self._emit("faults.allowed", self._node, f"by {by}: {standing.one_line(reason)}")
        return True
