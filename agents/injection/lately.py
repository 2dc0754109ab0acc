"""Which faults have ended within the last seconds, by a clock that nobody sets.

A record says when a fault was reverted by the date, for people; a date that is set back would make the fault count for
hours. So an end is dated when it is first seen. What had ended before the first look is history.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from agents.injection.ledger import Entry


class Lately:
    """Thread-safe. `look` is called about once a second or more often, with all entries there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ended: dict[str, float] | None = None  # id -> when its end was seen; -inf: before the first look

    def look(self, entries: Sequence[Entry], within_s: float) -> frozenset[str]:
        """The ids of those that ended within so many seconds."""
        now = self._clock()
        over = [entry.id for entry in entries if not entry.open]
        with self._lock:
            before = self._ended
            unseen = float("-inf") if before is None else now
            self._ended = {one: (before or {}).get(one, unseen) for one in over}
            return frozenset(one for one, at in self._ended.items() if now - at <= within_s)
