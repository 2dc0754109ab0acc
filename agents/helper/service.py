"""What the helper does with a request: everything is checked again here, whatever the agent has checked.

The injector with its guard, the ledger, the deadlines and the watchdog are those of an agent that has root
(agents/injection); they run here, on root's settings and root's directory. So a fault ends when its time is up whoever
is alive: agent dead, this process does it; this process dead, its watchdog; both dead, whoever is started first.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from agents.faults.catalog import CATALOG
from agents.helper import wire
from agents.helper.announced import Announced
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.injection.guard import JobFacts, Limits, OpenFault
from agents.injection.injector import Injection, Injector
from agents.injection.kennel import Kennel
from agents.injection.ledger import Entry, Ledger, LedgerError
from agents.injection.problems import FaultProblem

KINDS = {kind: fault for kind, fault in CATALOG.items() if fault.privileged}
KEPT_EVENTS = 256
MAX_TEXT = 2000


class Bulletin:
    """The last events, numbered from 1; each also goes to standard error, which is the node's journal. Thread-safe."""

    def __init__(self) -> None:
        self.boot = secrets.token_hex(6)
        self.last = 0
        self._events: deque[wire.Event] = deque(maxlen=KEPT_EVENTS)
        self._lock = threading.Lock()

    def emit(self, kind: str, thing: str, reason: str) -> None:
        with self._lock:
            self.last += 1
            self._events.append(wire.Event(self.last, kind, thing, reason[:MAX_TEXT]))
            with suppress(OSError, ValueError):
                line = " ".join(f"{kind} {thing}: {reason[:MAX_TEXT]}".split())
                print(f"ft-agent-helper: {line}", file=sys.stderr, flush=True)

    def after(self, number: int) -> tuple[wire.Event, ...]:
        with self._lock:
            return tuple(event for event in self._events if event.number > number)


class Service:
    """`answer` may be called from any thread; it raises nothing for what a peer can cause."""

    def __init__(
        self,
        ledger: Ledger,
        machine: Callable[[Announced], Machine],
        limits: Limits,
        *,
        users: frozenset[int],
        cgroups: tuple[str, ...] = (),
        registered_only: bool = False,
        per_minute: int,
        kennel: Kennel,
    ) -> None:
        self.bulletin = Bulletin()
        self._announced = Announced(users, cgroups, registered_only=registered_only)
        self._limits = limits
        self._kennel = kennel
        self._job = JobFacts()
        self._machine = machine(self._announced)
        self.injector = Injector(
            ledger, self._machine, limits, self.bulletin.emit, catalog=KINDS, job=lambda: self._job
        )
        self.injector.whose = "helper"
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._injecting = threading.Lock()

    def answer(
        self,
        request: wire.AnyRequest,
        gone: Callable[[], bool] = lambda: False,
        proven: frozenset[int] = frozenset(),
    ) -> wire.AnyReply:
        """`gone`: whoever asked does not wait any more, so nothing new is begun for it. `proven`: processes that came
        to the agent by themselves."""
        try:
            match request:
                case wire.Inject():
                    return self._one(self._inject(request, gone, proven))
                case wire.Revert(name, why):
                    return self._one(self.injector.revert(name, why))
                case wire.RevertAll(why):
                    entries = self.injector.revert_all(why, settle=True)
                    return wire.Several(_stamp(), tuple(self._said(entry) for entry in entries))
                case wire.KeepAlive(name):
                    return self._one(self.injector.keep_alive(name))
                case wire.Look(after, after_event):
                    return self._look(after, after_event)
                case wire.Abilities():
                    rules = tuple(wire.Protected.of(one) for one in self._limits.protection)
                    return wire.Able({kind: self._lacks(kind) for kind in KINDS}, rules)
        except FaultProblem as error:
            fault = None if error.entry is None else self._said(error.entry)
            return wire.Refused(error.code, error.thing, error.reason, error.hint, fault)

    # --- inject -------------------------------------------------------------------------------------------------------

    def _inject(self, wish: wire.Inject, gone: Callable[[], bool], proven: frozenset[int]) -> Entry:
        thing = f"{wish.kind} on {self._limits.node}"
        if not self._injecting.acquire(timeout=wire.TAKES_S):
            raise FaultProblem("failed", thing, "nothing was injected: another injection takes too long", "try again")
        try:
            if gone():
                raise FaultProblem("refused", thing, "whoever asked for it is gone")
            return self._inject_alone(wish, thing, proven)
        finally:
            self._injecting.release()

    def _inject_alone(self, wish: wire.Inject, thing: str, proven: frozenset[int]) -> Entry:
        known = self.injector.find(wish.request_id) if wish.request_id else None
        if known is None and not wish.dry_run:
            self._not_too_often(thing)
            try:
                self._kennel.start()
            except HostError as error:
                raise FaultProblem("failed", "watchdog of the helper", f"nothing was injected: {error}") from None
        fault = KINDS.get(wish.kind)
        if fault is not None:
            refusal = self._announced.take(wish, fault.target, proven)
            if refusal is not None:
                raise FaultProblem.refused(thing, refusal)
        job = wish.job
        self._job = JobFacts(job.known, job.contributing, job.min_replicas, job.problem)
        self.injector.here = wish.here
        self.injector.elsewhere = tuple(
            OpenFault(one.id, one.kind, one.nic, one.left_s, one.replica, one.rank, one.whole_node)
            for one in wish.elsewhere
        )
        entry = self.injector.inject(
            Injection(
                kind=wish.kind,
                owner=wish.owner,
                duration_s=wish.duration_s,
                nic=wish.nic,
                replica=wish.replica,
                rank=wish.rank,
                reason=wish.reason,
                params=dict(wish.params),
                request_id=wish.request_id,
                dead_man_s=wish.dead_man_s,
                allow_last_rail=wish.allow_last_rail,
                allow_last_replica=wish.allow_last_replica,
                dry_run=wish.dry_run,
                protection=tuple(one.rules() for one in wish.protect),
            )
        )
        if known is None and not wish.dry_run:
            self._begun.append(time.monotonic())
        return entry

    def _not_too_often(self, thing: str) -> None:
        """An agent that injects again whenever a fault ends would have it for ever all the same."""
        most = self._begun.maxlen or 0
        if len(self._begun) == most and time.monotonic() - self._begun[0] < 60.0:
            reason = f"{most} faults began within the last minute, and no more may (max_per_minute)"
            raise FaultProblem("refused", thing, reason, "wait, or raise it in the helper's configuration on the node")

    # --- look ---------------------------------------------------------------------------------------------------------

    def _look(self, after: str, after_event: int) -> wire.Faults:
        until = time.monotonic() + wire.LOOK_S
        while True:
            found = self._faults(after_event)
            left_s = until - time.monotonic()
            if found.mark != after or found.events or left_s <= 0:
                return found
            with self.injector.book.changed:
                self.injector.book.changed.wait(min(0.5, left_s))

    def _faults(self, after_event: int) -> wire.Faults:
        stamp = _stamp()
        faults = tuple(self._said(entry) for entry in self.injector.entries())
        damaged = tuple(wire.Damage(str(one.path), one.reason) for one in self.injector.damaged())
        mark = f"{hash((self.bulletin.boot, msgspec.json.encode((faults, damaged)))) & (1 << 64) - 1:x}"
        if after_event > self.bulletin.last:
            after_event = 0  # of a helper before this one
        events = self.bulletin.after(after_event)
        boot, node = self.bulletin.boot, self._limits.node
        return wire.Faults(
            stamp, mark, boot, node, faults, damaged, events, events[-1].number if events else after_event
        )

    def _lacks(self, kind: str) -> str:
        return self.injector.unsupported(KINDS[kind])

    def _one(self, entry: Entry) -> wire.One:
        return wire.One(_stamp(), self._said(entry))

    def _said(self, entry: Entry) -> wire.Fault:
        by_hand = tuple(self.injector.by_hand(entry)) if entry.open else ()
        return wire.Fault(wire.without_undo(entry), by_hand)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take back whatever a predecessor left. Raises LedgerError."""
        self.injector.start()

    def close(self) -> list[Entry]:
        """Take everything back; what is still open afterwards is returned, and then the watchdog goes on."""
        try:
            left = self.injector.close()
        except LedgerError:
            left = self.injector.book.open()
        if not left:
            self._kennel.close()
        return left

    def keep_watchdog(self) -> None:
        """Another one, where the one that was started has ended."""
        if self.injector.book.open() and self._kennel.pid is None:
            self.bulletin.emit("watchdog.lost", self._limits.node, "the helper's ended; another one is started")
            with suppress(HostError):
                self._kennel.start()


def _stamp() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
