"""A rank's heartbeats: to the coordinator if it is the leader of its replica, else to the leader.

The native thread begins with the first welcome, since only then is it known where the beats go. A leader of several
ranks takes in theirs on a UDP port of its own; what it learns of them is in its own beats (wire/heartbeat.py).
"""

from __future__ import annotations

import secrets
import threading
import time

from ftar_core.native import core

COOKIE_BYTES = 16


class Pulse:
    """Of rank `rank`. `beat_to` and `gather` in the control loop's thread, the rest from any."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._heartbeat: core.Heartbeat | None = None
        self._gathered: tuple[int, bytes] | None = None
        self._latest = (0, 0, 0, 0)
        self._ends: float | None = None  # of the present phase's budget, CLOCK_MONOTONIC
        self._stopped = False

    def beat_to(self, host: str, port: int, cookie: bytes, interval_ms: int) -> None:
        with self._lock:
            if self._stopped:
                return
            if self._heartbeat is None:
                self._heartbeat = core.Heartbeat(host, port, cookie, self._rank, interval_ms)
                self._heartbeat.progress(*self._latest)
                self._budget(self._heartbeat)
            else:
                self._heartbeat.retarget(host, port, cookie, interval_ms)

    def gather(self, host: str, ranks: int) -> tuple[int, bytes] | None:
        """Where the other ranks' beats go (UDP port of `host`, cookie); after `beat_to`. None: no such address."""
        with self._lock:
            if self._gathered is None and self._heartbeat is not None and not self._stopped:
                cookie = secrets.token_bytes(COOKIE_BYTES)
                try:
                    self._gathered = self._heartbeat.gather(host, cookie, ranks), cookie
                except (RuntimeError, ValueError):
                    return None
            return self._gathered

    def progress(self, phase: int, step: int, produced: int, reduced: int) -> None:
        """What the next beat says."""
        self._latest = (phase, step, produced, reduced)
        heartbeat = self._heartbeat
        if heartbeat is not None:
            heartbeat.progress(phase, step, produced, reduced)

    def budget(self, ends: float | None) -> None:
        """The present phase may last until `ends` (CLOCK_MONOTONIC seconds; None: it has no budget)."""
        if ends != self._ends:
            self._ends = ends
            heartbeat = self._heartbeat
            if heartbeat is not None:
                self._budget(heartbeat)

    def _budget(self, heartbeat: core.Heartbeat) -> None:
        heartbeat.budget(-1.0 if self._ends is None else max(0.0, self._ends - time.monotonic()))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
