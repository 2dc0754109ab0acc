"""A member's control loop: one thread that owns the Member machine and carries out what it decides.

Everything that can happen to a member meets in this one loop: messages of the coordinator, what the session posts, the
native core's events (an extra descriptor), and time. So the machine needs no lock, and a NewEpoch reaches the session
as soon as the kernel has it: plain `selectors`, no queue and no other thread in between.

A failure of this thread is never silent: an exception ends the session (exit code RESTART), with its traceback in the
log.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ftar_core.protocol.effects import (
    ApplyCommit,
    DiscardRing,
    End,
    EnterEpoch,
    FollowSources,
    MemberEffect,
    PrepareRing,
    Reconnect,
    RestoreState,
    SendHello,
    SendOutdated,
    StandDown,
    Tell,
    TellParts,
    Wait,
)
from ftar_core.protocol.events import Challenged, Disconnected, MemberEvent, Received, Tick
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.clock import Clock, SystemClock
from ftar_core.runtime.control import ControlConnection
from ftar_core.runtime.dialer import Backoff
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.waker import Waker
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import Describe, Done, EpochInfo, Message, Outline, RankInfo, Welcome

log = logging.getLogger("ftar.member")

# Connecting and the handshake together. A coordinator answers in milliseconds; one in the middle of a slow fsync may
# take longer, and one that takes this long is better tried anew.
HANDSHAKE_S = 5.0
WAIT_SLACK_S = 2.0  # the machine ends a member that is alone for too long; the shell does if the machine does not

MIN_TICK_S = 0.001  # a deadline that stays in the past must not become a busy loop


class MemberDelegate(Protocol):
    """What the training session does for its member. Called in the runtime's thread: must return within a millisecond
    or so (hand long work to another thread). An exception ends the session."""

    def describe(self) -> tuple[tuple[RankInfo, ...], str, int]:
        """(ranks, hash of the bucket plan, last step wished for or 0), for the Hello."""

    def outline(self) -> Outline:
        """Of the model: asked for when another replica's does not fit."""

    def welcomed(
        self, cookie: bytes, heartbeat_host: str, heartbeat_port: int, interval_ms: int, incarnation: int
    ) -> None:
        """Accepted by a coordinator: send heartbeats there. Comes before anything else of this coordinator."""

    def prepare_ring(self, epoch: EpochInfo) -> None: ...
    def discard_ring(self, epoch: EpochId) -> None: ...
    def enter_epoch(self, order: EnterEpoch) -> None: ...
    def apply_commit(self, order: ApplyCommit) -> None:
        """What is called after this belongs after the update: an `enter_epoch` is for the next step, and an `end` with
        exit code 0 or DRAINED takes effect when the update has run. The session keeps that order; this loop goes on."""

    def follow_sources(self, order: FollowSources) -> None: ...
    def stand_down(self, order: StandDown) -> None: ...
    def tell_parts(self, order: TellParts) -> None:
        """Post an Explanation."""

    def restore(self) -> None:
        """Nobody holds the job's state: look for a checkpoint, then post Restored."""

    def waiting(self, reason: str) -> None: ...
    def end(self, exit_code: int, reason: str) -> None:
        """The member is out; called once, last. The session must not go on."""


class MemberMachine(Protocol):
    """`ftar_core.protocol.member.Member`, as far as this shell knows it."""

    def handle(self, event: MemberEvent, now: float) -> Iterable[MemberEffect]: ...
    def deadline(self) -> float | None: ...


class MemberRuntime:
    """The shell around a Member machine.

    `extra`: (descriptor, callback) pairs; the callback runs in this thread whenever the descriptor is readable and may
    call `post`. The descriptors stay the caller's.
    """

    def __init__(
        self,
        settings: Settings,
        delegate: MemberDelegate,
        machine: MemberMachine,
        extra: Sequence[tuple[int, Callable[[], None]]] = (),
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._delegate = delegate
        self._machine = machine
        self._clock = clock or SystemClock()
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._selector.register(self._waker.fileno(), selectors.EVENT_READ, self._waker.drain)
        for descriptor, callback in extra:
            self._selector.register(descriptor, selectors.EVENT_READ, _ignoring_mask(callback))
        self._control = ControlConnection(settings, self, self._selector, self.call)
        self._posted: deque[MemberEvent] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="ftar-member", daemon=True)
        self._stop = False
        self._ended = False
        self._dial_at: float | None = 0.0
        self._handshake_by = 0.0
        self._backoff = Backoff()
        self._wait_s = settings.coordinator_wait_s
        self._alone_since = self._clock.now()
        self._last_trouble = "not tried yet"
        self._ticked_at = 0.0

    # --- for the session, from any thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._alone_since = self._clock.now()
        self._thread.start()

    def post(self, event: MemberEvent) -> None:
        """Feed an event to the machine, soon and in order. Thread-safe; ignored after the end."""
        if not self._stop:
            self._posted.append(event)
            self._wake()

    def tell(self, message: Message) -> None:
        """Tell the coordinator something on which nothing depends (a RailNotice): dropped without a connection."""
        self.call(lambda: self._control.tell(message))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the runtime's thread, soon. Thread-safe; ignored after the end."""
        if not self._stop:
            self._calls.append(function)
            self._wake()

    def close(self) -> None:
        """Stop: what was said is sent, the connection closed. Does not call `delegate.end`. Idempotent."""
        self._stop = True
        if self._thread.ident is None:
            self._tear_down()
        elif threading.current_thread() is not self._thread:
            self._waker.wake()
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # --- the loop --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if threading.current_thread() is not self._thread:
            self._waker.wake()

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        except Exception as error:
            log.exception("the member's control loop failed")
            self._end(RankExit.RESTART, f"internal error in the control loop: {type(error).__name__}: {error}")
        finally:
            self._tear_down()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout()):
            key.data(mask)
            self._work_off()
            if self._stop:
                return
        self._work_off()
        now = self._clock.now()
        deadline = self._tick_at()
        if deadline is not None and now >= deadline:
            self._ticked_at = now
            self._feed(Tick())
        if self._dial_at is not None and now >= self._dial_at:
            self._dial_at = None
            self._handshake_by = now + HANDSHAKE_S
            self._control.dial()
        elif self._control.open and not self._control.welcomed and now >= self._handshake_by:
            self._control.fail(f"no answer within {HANDSHAKE_S:g} s")
        if not self._control.welcomed and now >= self._alone_since + self._wait_s + WAIT_SLACK_S:
            where = self._settings.coordinator
            self._end(RankExit.RESTART, f"no coordinator at {where} for {self._wait_s:g} s ({self._last_trouble})")

    def _timeout(self) -> float | None:
        if self._posted or self._calls:
            return 0.0
        times = [self._tick_at(), self._dial_at]
        if not self._control.welcomed:
            times.append(self._alone_since + self._wait_s + WAIT_SLACK_S)
            if self._control.open:
                times.append(self._handshake_by)
        known = [t for t in times if t is not None]
        return max(0.0, min(known) - self._clock.now()) if known else None

    def _tick_at(self) -> float | None:
        deadline = self._machine.deadline()
        return None if deadline is None else max(deadline, self._ticked_at + MIN_TICK_S)

    def _work_off(self) -> None:
        while not self._stop and (self._calls or self._posted):
            if self._calls:
                self._calls.popleft()()
            else:
                self._feed(self._posted.popleft())

    def _tear_down(self) -> None:
        self._control.part()
        self._selector.close()
        self._waker.close()

    # --- the machine -----------------------------------------------------------------------------------------------

    def _feed(self, event: MemberEvent) -> None:
        if self._stop:
            return
        for effect in self._machine.handle(event, self._clock.now()):
            self._carry_out(effect)
            if self._stop:
                return

    def _carry_out(self, effect: MemberEffect) -> None:
        match effect:
            case Tell(message):
                self._control.tell(message)
                if isinstance(message, Done):
                    passes("done-sent", message.step)
            case EnterEpoch():
                self._delegate.enter_epoch(effect)
            case ApplyCommit():
                self._delegate.apply_commit(effect)
            case PrepareRing(epoch):
                self._delegate.prepare_ring(epoch)
            case DiscardRing(epoch_id):
                self._delegate.discard_ring(epoch_id)
            case FollowSources():
                self._delegate.follow_sources(effect)
            case StandDown():
                self._delegate.stand_down(effect)
            case TellParts():
                self._delegate.tell_parts(effect)
            case Wait(reason):
                self._delegate.waiting(reason)
            case RestoreState():
                self._delegate.restore()
            case SendHello():
                self._control.hello(effect, self._delegate.describe())
            case SendOutdated(promised):
                self._control.outdated(promised)
            case Reconnect(delay_s):
                if self._control.welcomed:
                    self._alone_since = self._clock.now()
                self._control.drop()
                self._dial_at = self._clock.now() + max(delay_s, self._backoff.next_s())
            case End(exit_code, reason):
                self._end(exit_code, reason)

    def _end(self, exit_code: int, reason: str) -> None:
        if self._ended:
            return
        self._ended = self._stop = True
        self._control.part()
        try:
            self._delegate.end(exit_code, reason)
        except Exception:
            # Nobody else can stop the training thread now; left alone it would wait for ever.
            log.critical("the session could not be ended (%s): the process ends at once", reason, exc_info=True)
            logging.shutdown()
            os._exit(exit_code or RankExit.RESTART)

    # --- told by the connection (ControlListener) ------------------------------------------------------------------

    def challenged(self, term: Term) -> None:
        self._feed(Challenged(term))

    def welcomed(self, welcome: Welcome, host: str, port: int) -> None:
        self._backoff.reset()
        self._last_trouble = ""
        self._wait_s = welcome.coordinator_wait_s
        self._delegate.welcomed(welcome.cookie, host, port, welcome.heartbeat_interval_ms, welcome.incarnation)
        self._feed(Received(welcome))

    def received(self, message: Message) -> None:
        if isinstance(message, Describe):
            self._control.tell(self._delegate.outline())
        else:
            self._feed(Received(message))

    def lost(self, why: str) -> None:
        """No (proven) coordinator any more, or still none: tell the machine, and try again."""
        if not self._last_trouble:
            self._alone_since = self._clock.now()
        if why != self._last_trouble:
            log.warning("coordinator at %s: %s", self._settings.coordinator, why)
            self._last_trouble = why
        self._feed(Disconnected(why))
        if not self._control.open and self._dial_at is None:
            self._dial_at = self._clock.now() + self._backoff.next_s()

    def misplaced(self, why: str) -> None:
        self._end(RankExit.REFUSED, why)


def _ignoring_mask(callback: Callable[[], None]) -> Callable[[int], None]:
    def ready(_mask: int) -> None:
        callback()

    return ready
