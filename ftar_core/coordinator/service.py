"""The coordinator's shell: sockets, store and clock around the Coordinator machine. One thread, one loop, no decisions.

TCP for control and UDP for heartbeats, on one port number. Effects are carried out in order and at once. The record is
written and fsynced inline: an epoch must not be sent before it, every member waits for that epoch anyway, and nothing
can come out of order. Heartbeats that arrive meanwhile wait in the socket's buffer, and are read before a Tick is fed:
a late loop must not look like silent members.

Plain `selectors` rather than asyncio: the write buffers, their bounds, and the moment of a close are ours.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import dropwhile, islice
from typing import Protocol

import msgspec

from ftar_core.coordinator.book import Book
from ftar_core.coordinator.events import EventLog
from ftar_core.coordinator.peers import (
    COOKIE_BYTES,
    MAX_STRANGERS,
    STRANGER_S,
    Kind,
    Peer,
    StrangerLog,
    Tokens,
    admit,
    hand_out,
    part,
)
from ftar_core.coordinator.store import FileStore, StoreUnknown
from ftar_core.errors import FencedError, StoreError, WireError
from ftar_core.protocol.effects import Close, CoordinatorEffect, Emit, Persist, Reply, Send, Stop
from ftar_core.protocol.events import (
    BeatSeen,
    ConnectionClosed,
    CoordinatorEvent,
    MemberHello,
    MemberMessage,
    Operator,
    OutdatedSeen,
    RecordFailed,
    Tick,
)
from ftar_core.runtime import breakpoints
from ftar_core.runtime.channel import Channel
from ftar_core.runtime.clock import Clock, SystemClock
from ftar_core.runtime.waker import Waker
from ftar_core.wire import heartbeat
from ftar_core.wire.address import Address
from ftar_core.wire.breakpoints import names_of
from ftar_core.wire.codec import FRAME_LIMIT, FrameParser, encode, prove, proved, to_coordinator, vouch
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import (
    Challenge,
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

ACCEPTS_A_TURN = 64
BEATS_A_TURN = 512
CLOSE_S = 2.0  # for a closing peer to take what is queued, and to close its side
HOUSEKEEPING_S = 0.25
FENCE_CHECK_S = 1.0
ACCEPT_PAUSE_S = 0.1  # when the process has no descriptor left
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
        self._tcp, self._udp = sockets
        self.port: int = self._tcp.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._peers: dict[int, Peer] = {}
        self._half_open: dict[int, Peer] = {}  # strangers, the oldest first
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._by_cookie: dict[bytes, int] = {}
        self._numbers = itertools.count(1)
        self._strangers = StrangerLog()
        self._queue: deque[CoordinatorEvent] = deque()
        self._busy = False
        self._exit: tuple[int, str] | None = None
        self._housekeeping_at = 0.0
        self._fence_at = 0.0
        self._accept_at: float | None = None
        self._ticked_at = 0.0
        self._step = 0  # of the last message that named one, for breakpoints

    def stop(self, exit_code: int, reason: str) -> None:
        """From any thread or a signal handler: end the service. Members are told nothing and wait for the next one."""
        if self._exit is None:
            self._exit = (exit_code, reason)
        self._waker.wake()

    def run(self) -> tuple[int, str]:
        self._selector.register(self._waker.fileno(), selectors.EVENT_READ, self._waker.drain)
        self._selector.register(self._tcp, selectors.EVENT_READ, self._accept)
        self._selector.register(self._udp, selectors.EVENT_READ, self._beats)
        try:
            while self._exit is None:
                self._turn()
            return self._exit
        finally:
            self._tear_down()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout()):
            key.data(mask)
            if self._exit is not None:
                return
        now = self._clock.now()
        deadline = self._machine.deadline()
        if deadline is not None and now >= max(deadline, self._ticked_at + MIN_TICK_S):
            self._ticked_at = now
            self._beats(selectors.EVENT_READ)
            self._feed(Tick())
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + HOUSEKEEPING_S
            self._keep_house(now)

    def _timeout(self) -> float:
        deadline = self._machine.deadline()
        at = self._housekeeping_at
        if deadline is not None:
            at = min(at, max(deadline, self._ticked_at + MIN_TICK_S))
        return max(0.0, at - self._clock.now())

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
                        self._send_to_all(conns, message)
                        sent = index + len(conns)
                    else:
                        self._send(conn, message)
                    self._passes("after-send", message)
                case Reply(conn, reply):
                    self._send(conn, reply)
                case Close(conn, why):
                    self._close(conn, why)
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

    # --- peers -----------------------------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, address = self._tcp.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: the listener stays readable, so look away for a moment instead of spinning.
                log.warning("connections are not accepted for %g s: %s", ACCEPT_PAUSE_S, error.strerror)
                self._selector.unregister(self._tcp)
                self._accept_at = self._clock.now() + ACCEPT_PAUSE_S
                self._housekeeping_at = min(self._housekeeping_at, self._accept_at)
                return
            self._greet(sock, str(Address(*address[:2])))

    def _greet(self, sock: socket.socket, address: str) -> None:
        if len(self._half_open) >= MAX_STRANGERS:
            oldest = next(iter(self._half_open.values()))
            self._drop(oldest, "too many half-open connections, this is the oldest")
        try:
            channel: Channel[ToCoordinator] = Channel(sock, FrameParser(to_coordinator))
        except OSError:
            sock.close()  # gone again already
            return
        peer = Peer(next(self._numbers), channel, address, self._clock.now())
        self._peers[peer.conn] = self._half_open[peer.conn] = peer
        self._selector.register(sock, selectors.EVENT_READ, self._reader(peer))
        vouched = prove(self._tokens.member, "challenge", self._job, vouch(peer.my_nonce, self._term))
        channel.send(Challenge(job=self._job, nonce=peer.my_nonce, term=self._term, proof=vouched))

    def _reader(self, peer: Peer) -> Callable[[int], None]:
        def ready(mask: int) -> None:
            self._ready(peer, mask)

        return ready

    def _ready(self, peer: Peer, mask: int) -> None:
        if peer.conn not in self._peers:
            return
        if mask & selectors.EVENT_WRITE:
            peer.channel.flush()
            self._watch(peer)
        if mask & selectors.EVENT_READ:
            for message in peer.channel.incoming():
                if peer.closing or self._exit is not None:
                    break
                self._arrived(peer, message)
        if peer.channel.broken:
            self._drop(peer, peer.why or peer.channel.broken)
        elif peer.closing:
            peer.half_close()

    def _arrived(self, peer: Peer, message: ToCoordinator) -> None:
        self._passes("heard", message)
        match (peer.kind, message):
            case (Kind.STRANGER, Knock(job=job, proof=proof)):
                if job == self._job and proved(self._tokens.member, "member-knock", job, peer.my_nonce, proof):
                    peer.channel.parser.limit = FRAME_LIMIT
                else:
                    self._drop(peer, "wrong job token")
            case (Kind.STRANGER, Hello() | OpHello()):
                self._hello(peer, message)
            case (Kind.STRANGER, Outdated(promised, proof)):
                if proved(self._tokens.member, "outdated", self._job, peer.my_nonce, proof):
                    self._feed(OutdatedSeen(promised))
                else:
                    self._drop(peer, "wrong job token")
            case (Kind.OPERATOR, OpRequest(id=number, op="events", after=after)):
                found = self._events.after(after)
                text = f"{len(found)} events"
                self._send(peer.conn, OpReply(id=number, code="ok", text=text, events=found))
            case (Kind.OPERATOR, OpRequest(id=number, op="status")):
                self._send(peer.conn, OpReply(id=number, code="ok", text="", job=self._view()))
            case (Kind.OPERATOR, OpRequest(id=number, op="accounting")) if self._book is not None:
                shown, kept = self._book.shown, self._book.shown_kept
                self._send(peer.conn, OpReply(id=number, code="ok", text="", accounting=shown, checkpoint=kept))
            case (Kind.OPERATOR, OpRequest()):
                self._feed(Operator(peer.conn, peer.name, message))
            case (Kind.MEMBER, Knock() | Hello() | OpHello() | Outdated() | OpRequest()) | (
                Kind.STRANGER | Kind.OPERATOR,
                _,
            ):
                self._drop(peer, f"a {type(message).__name__} out of place")
            case _:
                self._feed(MemberMessage(peer.conn, message))

    def _hello(self, peer: Peer, hello: Hello | OpHello) -> None:
        refusal = admit(peer, hello, self._job, self._tokens)
        self._half_open.pop(peer.conn, None)
        if refusal is not None:
            self._stranger(peer, refusal.reason)
            self._send(peer.conn, refusal)
            self._close(peer.conn, refusal.reason)
        elif isinstance(hello, Hello):
            peer.cookie = secrets.token_bytes(COOKIE_BYTES)
            self._by_cookie[peer.cookie] = peer.conn
            self._feed(MemberHello(peer.conn, hello))
        else:
            self._send(peer.conn, Welcome(term=self._term, incarnation=0, proof=b""))

    def _send(self, conn: int, message: Message) -> None:
        peer = self._peers.get(conn)
        if peer is None or peer.closing:
            return
        if isinstance(message, Welcome):
            message = msgspec.structs.replace(
                message, proof=peer.welcome_proof(self._job), cookie=peer.cookie, heartbeat_port=self.port
            )
        elif isinstance(message, Refused):
            message = msgspec.structs.replace(message, proof=peer.refusal_proof(self._job))
        if message is not self._encoded[0]:  # the same word often goes to everybody
            self._encoded = (message, encode(message))
        waited = peer.channel.pending_bytes
        peer.channel.send_frame(self._encoded[1])
        if waited or peer.channel.pending_bytes:
            self._watch(peer)
        if peer.channel.broken:
            self._drop(peer, peer.channel.broken)

    def _send_to_all(self, conns: Sequence[int], message: Message) -> None:
        found = [self._peers.get(conn) for conn in conns]
        for peer in hand_out(encode(message), [peer for peer in found if peer is not None and not peer.closing]):
            self._watch(peer)
            if peer.channel.broken:
                self._drop(peer, peer.channel.broken)

    def _view(self) -> JobView:
        view = self._machine.view(self._clock.now(), self._clock.time())
        return msgspec.structs.replace(view, pid=os.getpid(), started=self._started)

    def _close(self, conn: int, why: str) -> None:
        peer = self._peers.get(conn)
        if peer is not None and not peer.closing:
            peer.close_by = self._clock.now() + CLOSE_S
            peer.why = why
            peer.half_close()

    def _drop(self, peer: Peer, why: str) -> None:
        """Close now. The machine is told if it knew the connection."""
        if self._peers.pop(peer.conn, None) is None:
            return
        self._half_open.pop(peer.conn, None)
        self._by_cookie.pop(peer.cookie, None)
        self._selector.unregister(peer.channel.sock)
        peer.channel.close()
        if peer.kind is Kind.MEMBER:
            self._feed(ConnectionClosed(peer.conn, why))
        elif peer.kind is Kind.STRANGER and not peer.closing:
            self._stranger(peer, why)

    def _stranger(self, peer: Peer, why: str) -> None:
        line = self._strangers.note(peer.address, why, self._clock.now())
        if line is not None:
            log.warning("%s", line)
            event = EventView(
                seq=0, time=0.0, source="coordinator", kind="stranger.dropped", object=peer.address, reason=why
            )
            self._events.add(event, self._clock.time())

    def _watch(self, peer: Peer) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.pending_bytes else 0)
        if not peer.channel.broken and self._selector.get_key(peer.channel.sock).events != mask:
            self._selector.modify(peer.channel.sock, mask, self._reader(peer))

    # --- heartbeats ------------------------------------------------------------------------------------------------

    def _beats(self, _mask: int) -> None:
        receive, known, feed = self._udp.recv, self._by_cookie, self._feed
        for _ in range(BEATS_A_TURN):
            try:
                datagram = receive(heartbeat.LONGEST_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                continue  # an ICMP error of something sent earlier
            try:
                beat = heartbeat.parse(datagram)
            except WireError:
                continue  # anybody can send anything; nothing is kept, nothing is answered
            conn = known.get(beat.cookie)
            if conn is not None:
                feed(BeatSeen(conn, beat.phase, beat.step, beat.produced, beat.reduced, beat.team, beat.overdue))

    # --- housekeeping ----------------------------------------------------------------------------------------------

    def _keep_house(self, now: float) -> None:
        if self._book is not None:
            self._book.keep()
        for peer in [p for p in self._peers.values() if p.close_by is not None and now >= p.close_by]:
            self._drop(peer, peer.why)
        for peer in [p for p in self._half_open.values() if not p.closing and now >= p.since + STRANGER_S]:
            self._drop(peer, f"no hello within {STRANGER_S:g} s")
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._selector.register(self._tcp, selectors.EVENT_READ, self._accept)
        if now >= self._fence_at:
            self._fence_at = now + FENCE_CHECK_S
            try:
                self._store.check()
            except FencedError as error:
                self._exit = (RESTART, str(error))

    def _tear_down(self) -> None:
        """Stop listening, let every peer have what was said to it (bounded), close."""
        self._tcp.close()
        self._udp.close()
        part(self._peers.values(), self._clock)
        self._peers.clear()
        self._selector.close()
        self._waker.close()


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
