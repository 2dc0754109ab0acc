"""The clocks of this machine, as one replaceable object: `now` for decisions, `time` for people.

Decisions take seconds of CLOCK_MONOTONIC, which never jumps; only what is shown or logged is dated with wall time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of CLOCK_MONOTONIC: the `now` of the pure machines."""

    def time(self) -> float:
        """Unix seconds, for events and logs."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()
