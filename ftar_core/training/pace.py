"""A limit on how fast state is given away, so that the gradients on the same rails do not suffer. Pure: `now` is given.

A token bucket, kept as the one moment at which everything let through so far is paid for (GCRA, ITU-T I.371 annex A):
no tokens are counted, so nothing is lost to rounding and nothing needs a timer. Connections that wait at the same pace
are served in the order in which they asked, one piece each, so that shadows share it evenly.

The stream of steps is charged too, but never waits: it is what a shadow must keep up with. The fetch gets what is left;
what the stream may take of it in advance is bounded, so that a fetch always moves a little and a limit that is too low
can be seen as such, instead of looking like a dead source.
"""

from __future__ import annotations

BURST_S = 0.02
DEBT_S = 0.5  # at most so far ahead can the stream make the fetch wait


class Pace:
    """`bytes_per_s` 0: no limit. Times in seconds of any one clock."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._paid_at = 0.0

    def reserve(self, now: float, size: int) -> float:
        """How long to wait before these bytes may go. They count as sent: to be called once a piece."""
        if self.bytes_per_s <= 0:
            return 0.0
        begins = max(self._paid_at, now - BURST_S)
        self._paid_at = begins + size / self.bytes_per_s
        return max(0.0, begins - now)

    def charge(self, now: float, size: int) -> None:
        """These bytes go in any case; others wait for them."""
        if self.bytes_per_s > 0:
            begins = max(self._paid_at, now - BURST_S)
            self._paid_at = max(begins, min(begins + size / self.bytes_per_s, now + DEBT_S))
