"""Watches the job while faults of this agent are in force, and halts them when too few replicas contribute.

Faults that cannot be taken back (a kill) count for a while. What is low when nothing of ours is in force is not our
doing, and nobody is asked then: an agent at rest costs the coordinator nothing. A coordinator that does not answer says
nothing about its replicas, so it neither trips the breaker nor resets it. No date counts:
what an agent before this one did has its time since the machine was started.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from agents.api.audit import AuditRecord
from agents.api.blast import FELT_BY_NOBODY
from agents.api.breaker import Breaker, Share
from agents.api.models import JobState
from agents.audit import AuditLog
from agents.halt import Halt
from agents.host.clock import Clock, SystemClock
from agents.injection.control import FaultControl
from agents.injection.ledger import Entry
from agents.injection.problems import FaultProblem
from agents.problems import ApiProblem
from agents.settings import BreakerSettings

_LOG = logging.getLogger(__name__)

LOOK_S = 1.0
FELT_S = 60.0  # so long what follows from a fault that is over may be its doing
OVER = ("finished", "stopped")


class BreakerWatch:
    """`job` may raise ApiProblem. `tick` is one look, for tests with a clock of their own."""

    def __init__(  # noqa: PLR0917
        self,
        node: str,
        settings: BreakerSettings,
        faults: FaultControl,
        halt: Halt,
        job: Callable[[], JobState],
        audit: AuditLog,
        clock: Clock | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._settings = node, settings
        self._faults, self._halt, self._job, self._audit = faults, halt, job, audit
        self._clock, self._monotonic = clock or SystemClock(), monotonic
        self._breaker = Breaker()
        self._settled: set[str] = set()  # faults of before a halt: somebody has allowed others since
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breaker", daemon=True)

    def start(self) -> None:
        if self._settings.replicas_percent > 0:
            self._thread.start()

    def close(self) -> None:
        self._ending.set()

    def tick(self) -> bool:
        """Whether faults were halted by this look."""
        entries = self._faults.entries()
        if self._halt.view() is not None:
            self._settled = {entry.id for entry in entries}
            self._breaker.calm()
            return False
        if not any(self._counts(entry) for entry in entries):
            self._breaker.calm()
            return False
        try:
            job = self._job()
        except ApiProblem:
            return False
        good = sum(replica.state == "contributing" for replica in job.replicas)
        wanted = 0 if job.state in OVER else job.replicas_wanted
        share = Share("replicas contribute", good, wanted, self._settings.replicas_percent)
        why = self._breaker.look(self._monotonic(), (share,), self._settings.after_s)
        if why:
            self._trip(why)
        return bool(why)

    def _counts(self, entry: Entry) -> bool:
        if entry.id in self._settled or entry.kind in FELT_BY_NOBODY:
            return False
        if entry.open:
            return True
        if entry.boot_id != self._clock.boot_id():
            return False  # of before a reboot, which nothing outlives
        since = entry.created_boot_s if entry.over_boot_s is None else entry.over_boot_s
        return self._clock.boot_s() - since <= FELT_S

    def _trip(self, why: str) -> None:
        by, reason = "breaker", f"{why} (breaker of {self._node})"
        self._settled = {entry.id for entry in self._faults.entries()}
        changed, view = self._halt.hold(by, reason)
        if not changed:
            return
        left: list[str] = []
        result = "ok"
        try:
            self._halt.save(view)
        except ApiProblem as error:
            result, left = error.body.code, [error.body.reason]
        try:
            after = self._faults.revert_all(f"halted by the {by}: {why}", settle=True)
            left += [f"{entry.id} {entry.state.value}" for entry in after]
        except FaultProblem as error:
            result, left = error.code, [*left, error.reason]
        self._audit.add(
            AuditRecord(
                time=self._clock.wall_s(),
                node=self._node,
                who=by,
                source="agent",
                action="halt",
                why=reason,
                result=result,
                detail=", ".join(left)[:500],
            )
        )

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look must come
                _LOG.warning("the breaker's look at the job: %s: %s", type(error).__name__, error)
