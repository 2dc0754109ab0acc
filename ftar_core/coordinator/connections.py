"""The coordinator's sockets: TCP for control and UDP for heartbeats, on one port number.

Connections are taken, read, written and closed here; what a message means is for others. Heartbeats wait in the
socket's buffer until they are read (`beats`).

Plain `selectors` rather than asyncio: the write buffers, their bounds, and the moment of a close are ours.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence

import msgspec

from ftar_core.coordinator.peers import (
    COOKIE_BYTES,
    MAX_STRANGERS,
    STRANGER_S,
    Kind,
    Peer,
    Tokens,
    admit,
    hand_out,
    part,
)
from ftar_core.errors import WireError
from ftar_core.protocol.events import BeatSeen, ConnectionClosed, CoordinatorEvent
from ftar_core.runtime.channel import Channel
from ftar_core.runtime.clock import Clock
from ftar_core.wire import heartbeat
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FrameParser, encode, prove, to_coordinator, vouch
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import Challenge, Hello, Message, OpHello, Refused, ToCoordinator, Welcome

log = logging.getLogger("ftar.coordinator")

ACCEPTS_A_TURN = 64
BEATS_A_TURN = 512
CLOSE_S = 2.0  # for a closing peer to take what is queued, and to close its side
ACCEPT_PAUSE_S = 0.1  # when the process has no descriptor left


class Connections:
    """`heard` gets what comes from a peer, `feed` what the machine has to know of connections, `turned_away` a stranger
    who was dropped, and why. All in the thread that runs the selector."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sockets: tuple[socket.socket, socket.socket],
        job: str,
        term: Term,
        tokens: Tokens,
        *,
        clock: Clock,
        heard: Callable[[Peer, ToCoordinator], None],
        feed: Callable[[CoordinatorEvent], None],
        turned_away: Callable[[Peer, str], None],
    ) -> None:
        self._selector = selector
        self._tcp, self._udp = sockets
        self._job, self._term, self._tokens = job, term, tokens
        self._clock = clock
        self._heard, self._feed, self._turned_away = heard, feed, turned_away
        self.port: int = self._tcp.getsockname()[1]
        self.accept_at: float | None = None  # when connections are taken again, if they are not now
        self._peers: dict[int, Peer] = {}
        self._half_open: dict[int, Peer] = {}  # strangers, the oldest first
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._by_cookie: dict[bytes, int] = {}
        self._numbers = itertools.count(1)

    def open(self) -> None:
        self._selector.register(self._tcp, selectors.EVENT_READ, self._accept)
        self._selector.register(self._udp, selectors.EVENT_READ, self.beats)

    def close_all(self) -> None:
        """Stop listening, let every peer have what was said to it (bounded), close."""
        self._tcp.close()
        self._udp.close()
        part(self._peers.values(), self._clock)
        self._peers.clear()

    def keep_house(self, now: float) -> None:
        """Drop whoever had time enough; take connections again."""
        for peer in [p for p in self._peers.values() if p.close_by is not None and now >= p.close_by]:
            self.drop(peer, peer.why)
        for peer in [p for p in self._half_open.values() if not p.closing and now >= p.since + STRANGER_S]:
            self.drop(peer, f"no hello within {STRANGER_S:g} s")
        if self.accept_at is not None and now >= self.accept_at:
            self.accept_at = None
            self._selector.register(self._tcp, selectors.EVENT_READ, self._accept)

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
                self.accept_at = self._clock.now() + ACCEPT_PAUSE_S
                return
            self._greet(sock, str(Address(*address[:2])))

    def _greet(self, sock: socket.socket, address: str) -> None:
        if len(self._half_open) >= MAX_STRANGERS:
            oldest = next(iter(self._half_open.values()))
            self.drop(oldest, "too many half-open connections, this is the oldest")
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
                if peer.closing:
                    break
                self._heard(peer, message)
        if peer.channel.broken:
            self.drop(peer, peer.why or peer.channel.broken)
        elif peer.closing:
            peer.half_close()

    def admit(self, peer: Peer, hello: Hello | OpHello) -> bool:
        """Take a stranger who said who it is for a member or an operator; or refuse it, with a reason."""
        refusal = admit(peer, hello, self._job, self._tokens)
        self._half_open.pop(peer.conn, None)
        if refusal is not None:
            self._turned_away(peer, refusal.reason)
            self.send(peer.conn, refusal)
            self.close(peer.conn, refusal.reason)
            return False
        if peer.kind is Kind.MEMBER:
            peer.cookie = secrets.token_bytes(COOKIE_BYTES)
            self._by_cookie[peer.cookie] = peer.conn
        return True

    def send(self, conn: int, message: Message) -> None:
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
            self.drop(peer, peer.channel.broken)

    def send_to_all(self, conns: Sequence[int], message: Message) -> None:
        found = [self._peers.get(conn) for conn in conns]
        for peer in hand_out(encode(message), [peer for peer in found if peer is not None and not peer.closing]):
            self._watch(peer)
            if peer.channel.broken:
                self.drop(peer, peer.channel.broken)

    def close(self, conn: int, why: str) -> None:
        peer = self._peers.get(conn)
        if peer is not None and not peer.closing:
            peer.close_by = self._clock.now() + CLOSE_S
            peer.why = why
            peer.half_close()

    def drop(self, peer: Peer, why: str) -> None:
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
            self._turned_away(peer, why)

    def _watch(self, peer: Peer) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.pending_bytes else 0)
        if not peer.channel.broken and self._selector.get_key(peer.channel.sock).events != mask:
            self._selector.modify(peer.channel.sock, mask, self._reader(peer))

    # --- heartbeats ------------------------------------------------------------------------------------------------

    def beats(self, _mask: int = selectors.EVENT_READ) -> None:
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
