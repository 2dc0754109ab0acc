"""Evidence about hung replicas, before they are evicted; and the end of a process that does not wake up after it.

The coordinator alone can tell who is hung, but it cannot look into a process: the agent of the node does. It asks the
coordinator who is hung, but only while a rank of this node has stood still for a moment (or says nothing, as one that
holds the GIL does), so that a healthy job's coordinator hears nothing of its many agents.

A replica that was evicted as hung comes back by itself if it wakes up. If it is supervised here and has not within the
grace period, its processes are ended and started again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents.evidence import Evidence, as_text
from agents.job import JobRelay
from agents.node import Parts
from agents.problems import ApiProblem
from agents.recovery.errors import SupervisionError
from ftar_core.wire.messages import EVIDENCE_BYTES, HangView

_LOG = logging.getLogger(__name__)
LOOK_S = 0.5
STILL_S = 1.5
KEPT = 16  # files in STATE/evidence


class HangWatch:
    """One thread. `emit(kind, object, reason)` makes an event of this agent."""

    def __init__(
        self,
        parts: Parts,
        evidence: Evidence,
        relay: JobRelay,
        *,
        directory: Path,
        grace_s: float,
        emit: Callable[[str, str, str], object],
    ) -> None:
        self._parts, self._evidence, self._relay = parts, evidence, relay
        self._directory, self._grace_s, self._emit = directory, grace_s, emit
        self._principal = f"agent-{parts.name}"
        self._steps: dict[tuple[str, int], tuple[int, float]] = {}
        self._sent: set[tuple[str, int]] = set()
        self._evicted: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hangwatch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look(time.monotonic())
            except (ApiProblem, SupervisionError, OSError) as error:
                _LOG.warning("the watch over hung replicas: %s", error)

    def _look(self, now: float) -> None:
        still = self._still(now)
        if not still and not self._evicted:
            return
        try:
            hangs = self._relay.request(self._principal, "hangs").hangs
        except ApiProblem:
            return  # no coordinator: nobody is evicted either
        for hang in hangs:
            if hang.wanted and hang.replica in still and (hang.replica, hang.incarnation) not in self._sent:
                self._send(hang)
        self._end_those_that_sleep_on(hangs, now)

    def _still(self, now: float) -> set[str]:
        """Replicas with a rank here that may be stuck, as far as its reports show."""
        found = set()
        seen = set()
        for view in self._parts.ranks():
            key = (view.replica, view.rank)
            seen.add(key)
            step, since = self._steps.get(key, (-1, now))
            if view.step != step:
                self._steps[key] = (view.step, now)
            elif now - since >= STILL_S or view.silent_s >= STILL_S:
                found.add(view.replica)
        for key in set(self._steps) - seen:
            del self._steps[key]
        return found

    def _send(self, hang: HangView) -> None:
        with contextlib.suppress(ApiProblem):
            ranks = self._evidence.of_replica(hang.replica)
            named = [one for one in ranks if one.rank == hang.rank]
            if not named:
                return  # the agent of that rank's node has the better view
            text = as_text([*named, *(one for one in ranks if one.rank != hang.rank)], EVIDENCE_BYTES)
            place = self._keep(hang.replica, text)
            self._relay.request(self._principal, "evidence", replica=hang.replica, reason=text)
            self._sent.add((hang.replica, hang.incarnation))
            self._emit("replica.stacks", hang.replica, f"{text.partition(chr(10))[0]}; kept in {place}")

    def _keep(self, replica: str, text: str) -> str:
        """A file for later, the oldest make room. Without it the event still has the text."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            path = self._directory / f"{replica}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.txt"
            path.write_text(text, encoding="utf-8")
            for old in sorted(self._directory.glob("*.txt"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
                old.unlink()
        except OSError as error:
            return f"no file ({error.strerror})"
        return str(path)

    def _end_those_that_sleep_on(self, hangs: tuple[HangView, ...], now: float) -> None:
        supervisor = self._parts.supervisor
        out = {(h.replica, h.incarnation) for h in hangs if h.evicted}
        self._evicted = {key: self._evicted.get(key, now) for key in out}
        for key, since in list(self._evicted.items()):
            replica = key[0]
            if supervisor is None or not supervisor.supervises(replica) or now - since < self._grace_s:
                continue
            self._evicted[key] = float("inf")  # once
            why = f"evicted as hung, and it did not wake up within {self._grace_s:g} s"
            self._emit("replica.restarted", replica, why)
            supervisor.restart_replica(replica, why)
