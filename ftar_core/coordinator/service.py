"""The coordinator's shell: sockets, store and clock around the Coordinator machine. One thread, one loop, no decisions.

Effects are carried out in order and at once. The record is
written and fsynced inline: an epoch must not be sent before it, every member waits for that epoch anyway, and nothing
can come out of order. Heartbeats that arrive meanwhile wait in the socket's buffer, and are read before a Tick is fed:
a late loop must not look like silent members. The sockets themselves: connections.py.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import dropwhile, islice
from typing import Protocol

import msgspec

from ftar_core.coordinator.book import Book
from ftar_core.coordinator.connections import Connections
from ftar_core.coordinator.events import EventLog
from ftar_core.coordinator.peers import Kind, Peer, StrangerLog, Tokens
from ftar_core.coordinator.store import FileStore, StoreUnknown
from ftar_core.errors import FencedError, StoreError
from ftar_core.protocol.effects import Close, CoordinatorEffect, Emit, Persist, Reply, Send, Stop
from ftar_core.protocol.events import (
    CoordinatorEvent,
    MemberHello,
    MemberMessage,
    Operator,
    OutdatedSeen,
    RecordFailed,
    Tick,
)
from ftar_core.runtime import breakpoints
from ftar_core.runtime.clock import Clock, SystemClock
from ftar_core.runtime.waker import Waker
from ftar_core.wire.breakpoints import names_of
from ftar_core.wire.codec import FRAME_LIMIT, proved
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import (
    EventView,
    Hello,
    JobView,
    Knock,
    Message,
    OpHello,
    OpReply,
    OpRequest,
    Outdated,
    Refused,
    ToCoordinator,
    Welcome,
)

log = logging.getLogger("ftar.coordinator")

HOUSEKEEPING_S = 0.25
FENCE_CHECK_S = 1.0
MIN_TICK_S = 0.001
RESTART = 75  # EX_TEMPFAIL: start the coordinator again


class CoordinatorMachine(Protocol):
    """`ftar_core.protocol.coordinator.Coordinator`, as far as this shell knows it."""

    def handle(self, event: CoordinatorEvent, now: float) -> Iterable[CoordinatorEffect]: ...
    def deadline(self) -> float | None: ...
    def view(self, now: float, wall: float) -> JobView: ...


class Service:
    """`run` serves until the machine stops it, the store is fenced, or `stop` is called: (exit code, why)."""

    def __init__(
        self,
        machine: CoordinatorMachine,
        job: str,
        term: Term,
        tokens: Tokens,
        *,
        store: FileStore,
        events: EventLog,
        sockets: tuple[socket.socket, socket.socket],
        clock: Clock | None = None,
        book: Book | None = None,
    ) -> None:
        self._book = book
        self._machine = machine
        self._job = job
        self._term = term
        self._tokens = tokens
        self._store = store
        self._events = events
        self._clock = clock or SystemClock()
        self._started = self._clock.time()
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._connections = Connections(
            self._selector,
            sockets,
            job,
            term,
            tokens,
            clock=self._clock,
            heard=self._heard,
            feed=self._feed,
            turned_away=self._turned_away,
        )
        self.port = self._connections.port
        self._strangers = StrangerLog()
        self._queue: deque[CoordinatorEvent] = deque()
        self._busy = False
        self._exit: tuple[int, str] | None = None
        self._housekeeping_at = 0.0
        self._fence_at = 0.0
        self._ticked_at = 0.0
        self._step = 0  # of the last message that named one, for breakpoints

    def stop(self, exit_code: int, reason: str) -> None:
        """From any thread or a signal handler: end the service. Members are told nothing and wait for the next one."""
        if self._exit is None:
            self._exit = (exit_code, reason)
        self._waker.wake()

    def run(self) -> tuple[int, str]:
        self._selector.register(self._waker.fileno(), selectors.EVENT_READ, self._waker.drain)
        self._connections.open()
        try:
            while self._exit is None:
                self._turn()
            return self._exit
        finally:
            self._connections.close_all()
            self._selector.close()
            self._waker.close()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout()):
            key.data(mask)
            if self._exit is not None:
                return
        now = self._clock.now()
        deadline = self._machine.deadline()
        if deadline is not None and now >= max(deadline, self._ticked_at + MIN_TICK_S):
            self._ticked_at = now
            self._connections.beats()
            self._feed(Tick())
        if now >= self._house_at():
            self._housekeeping_at = now + HOUSEKEEPING_S
            self._keep_house(now)

    def _timeout(self) -> float:
        deadline = self._machine.deadline()
        at = self._house_at()
        if deadline is not None:
            at = min(at, max(deadline, self._ticked_at + MIN_TICK_S))
        return max(0.0, at - self._clock.now())

    def _house_at(self) -> float:
        accept_at = self._connections.accept_at
        return self._housekeeping_at if accept_at is None else min(self._housekeeping_at, accept_at)

    # --- the machine -----------------------------------------------------------------------------------------------

    def _feed(self, event: CoordinatorEvent) -> None:
        """Events that arise while effects are carried out (a broken connection) wait for the end of the list."""
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue and self._exit is None:
                effects = list(self._machine.handle(self._queue.popleft(), self._clock.now()))
                if effects:  # most events are heartbeats, which have none
                    self._carry_out(effects)
        finally:
            self._busy = False

    def _carry_out(self, effects: Sequence[CoordinatorEffect]) -> None:
        sent = 0  # effects before this one have gone with an earlier one
        for index, effect in enumerate(effects):
            match effect:
                case Persist(record):
                    self._passes("before-record", effects)
                    try:
                        self._store.write(record)
                    except (FencedError, StoreUnknown) as error:
                        self._exit = (RESTART, _with_hint(error))
                        return
                    except StoreError as error:
                        log.error("%s", _with_hint(error))
                        self._queue.appendleft(RecordFailed(_with_hint(error)))  # before all that happened meanwhile
                        return
                    self._passes("after-record", effects)
                case Send() if index < sent:
                    pass
                case Send(conn, message):
                    self._passes("before-send", message)
                    conns = _of_the_same(effects, index) if breakpoints.armed is None else ()
                    if len(conns) > 1:
                        self._connections.send_to_all(conns, message)
                        sent = index + len(conns)
                    else:
                        self._connections.send(conn, message)
                    self._passes("after-send", message)
                case Reply(conn, reply):
                    self._connections.send(conn, reply)
                case Close(conn, why):
                    self._connections.close(conn, why)
                case Emit(event):
                    self._emit(event)
                case Stop(exit_code, reason, promised):
                    if promised is not None:
                        self._raise_floor(promised)
                    self._exit = (exit_code, reason)
                    return

    def _raise_floor(self, promised: Term) -> None:
        try:
            self._store.raise_floor(promised.number)
        except StoreError as error:
            log.error("%s", _with_hint(error))

    def _passes(self, point: str, what: Message | Sequence[CoordinatorEffect]) -> None:
        if breakpoints.armed is None:
            return
        message = what if isinstance(what, Message) else _message_behind(what)
        self._step = max(self._step, getattr(message, "step", 0))
        breakpoints.passes(point, self._step)
        for name in names_of(message) if message is not None else ():
            breakpoints.passes(f"{point}:{name}", self._step)

    def _emit(self, event: EventView) -> None:
        event = self._events.add(event, self._clock.time())
        log.info("%s %s: %s", event.kind, event.object, event.reason)

    # --- what the peers say ---------------------------------------------------------------------------------------

    def _heard(self, peer: Peer, message: ToCoordinator) -> None:
        if self._exit is not None:
            return
        self._passes("heard", message)
        match (peer.kind, message):
            case (Kind.STRANGER, Knock(job=job, proof=proof)):
                if job == self._job and proved(self._tokens.member, "member-knock", job, peer.my_nonce, proof):
                    peer.channel.parser.limit = FRAME_LIMIT
                else:
                    self._connections.drop(peer, "wrong job token")
            case (Kind.STRANGER, Hello() | OpHello()):
                self._hello(peer, message)
            case (Kind.STRANGER, Outdated(promised, proof)):
                if proved(self._tokens.member, "outdated", self._job, peer.my_nonce, proof):
                    self._feed(OutdatedSeen(promised))
                else:
                    self._connections.drop(peer, "wrong job token")
            case (Kind.OPERATOR, OpRequest(id=number, op="events", after=after)):
                found = self._events.after(after)
                text = f"{len(found)} events"
                self._connections.send(peer.conn, OpReply(id=number, code="ok", text=text, events=found))
            case (Kind.OPERATOR, OpRequest(id=number, op="status")):
                self._connections.send(peer.conn, OpReply(id=number, code="ok", text="", job=self._view()))
            case (Kind.OPERATOR, OpRequest(id=number, op="accounting")) if self._book is not None:
                shown, kept = self._book.shown, self._book.shown_kept
                self._connections.send(
                    peer.conn, OpReply(id=number, code="ok", text="", accounting=shown, checkpoint=kept)
                )
            case (Kind.OPERATOR, OpRequest()):
                self._feed(Operator(peer.conn, peer.name, message))
            case (Kind.MEMBER, Knock() | Hello() | OpHello() | Outdated() | OpRequest()) | (
                Kind.STRANGER | Kind.OPERATOR,
                _,
            ):
                self._connections.drop(peer, f"a {type(message).__name__} out of place")
            case _:
                self._feed(MemberMessage(peer.conn, message))

    def _hello(self, peer: Peer, hello: Hello | OpHello) -> None:
        if not self._connections.admit(peer, hello):
            return
        if isinstance(hello, Hello):
            self._feed(MemberHello(peer.conn, hello))
        else:
            self._connections.send(peer.conn, Welcome(term=self._term, incarnation=0, proof=b""))

    def _view(self) -> JobView:
        view = self._machine.view(self._clock.now(), self._clock.time())
        return msgspec.structs.replace(view, pid=os.getpid(), started=self._started)

    def _turned_away(self, peer: Peer, why: str) -> None:
        line = self._strangers.note(peer.address, why, self._clock.now())
        if line is not None:
            log.warning("%s", line)
            event = EventView(
                seq=0, time=0.0, source="coordinator", kind="stranger.dropped", object=peer.address, reason=why
            )
            self._events.add(event, self._clock.time())

    # --- housekeeping ----------------------------------------------------------------------------------------------

    def _keep_house(self, now: float) -> None:
        if self._book is not None:
            self._book.keep()
        self._connections.keep_house(now)
        if now >= self._fence_at:
            self._fence_at = now + FENCE_CHECK_S
            try:
                self._store.check()
            except FencedError as error:
                self._exit = (RESTART, str(error))


def _of_the_same(effects: Sequence[CoordinatorEffect], index: int) -> list[int]:
    """The connections of this Send and of those right behind it that send the same. What has a proof in it (a Welcome,
    a Refused) is for one alone."""
    first = effects[index]
    conns: list[int] = []
    for effect in islice(effects, index, None):
        if not isinstance(effect, Send) or not isinstance(first, Send) or effect.message is not first.message:
            break
        conns.append(effect.conn)
        if isinstance(effect.message, Welcome | Refused):
            break
    return conns


def _message_behind(effects: Sequence[CoordinatorEffect]) -> Message | None:
    """What is said first once the record of this list is written."""
    behind = dropwhile(lambda effect: not isinstance(effect, Persist), effects)
    return next((effect.message for effect in behind if isinstance(effect, Send)), None)


def _with_hint(error: StoreError) -> str:
    return f"{error} ({error.hint})" if error.hint else str(error)
