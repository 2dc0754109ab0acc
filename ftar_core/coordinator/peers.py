"""Who is connected: strangers first, then members and operators. The handshake of the coordinator's side.

A stranger gets a challenge, STRANGER_S seconds, 64 KiB of memory, and one try; more memory only for one that has proved
the job's token and announces a long hello with it (`Knock`). There may be MAX_STRANGERS of them; the
oldest goes when one more comes, so that a flood of half-open connections cannot lock out a member, whose own handshake
takes a millisecond. Each address is named in the log once, then at most every STRANGER_LOG_S: a port scanner must not
fill the disk either.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from ftar_core import native
from ftar_core.runtime.channel import Channel
from ftar_core.runtime.clock import Clock
from ftar_core.wire.codec import FRAME_LIMIT, nonce, prove, proved
from ftar_core.wire.ids import valid_name
from ftar_core.wire.messages import PROTOCOL_VERSION, Hello, OpHello, Refused, ToCoordinator

STRANGER_S = 3.0
MAX_STRANGERS = 512  # a thousand replicas knock at once when a job starts, or its coordinator comes back
STRANGER_LOG_S = 60.0
FAREWELL_S = 1.0  # for all peers together, when the service ends
_ADDRESSES_KEPT = 1024
COOKIE_BYTES = 16


class Kind(Enum):
    STRANGER = "stranger"
    MEMBER = "member"
    OPERATOR = "operator"


@dataclass
class Peer:
    """One connection. `conn` is its number, never used twice."""

    conn: int
    channel: Channel[ToCoordinator]
    address: str  # of the other side, for logs
    since: float
    kind: Kind = Kind.STRANGER
    name: str = ""  # replica or principal
    my_nonce: bytes = field(default_factory=nonce)
    their_nonce: bytes = b""
    cookie: bytes = b""
    token: bytes = field(default=b"", repr=False)  # the one it has proved
    close_by: float | None = None  # closing: what is queued is still sent, what comes is not read any more
    why: str = ""
    half_closed: bool = False

    @property
    def closing(self) -> bool:
        return self.close_by is not None

    def half_close(self) -> None:
        """Once all queued bytes are out: FIN; the rest when the other side closes too. An immediate close(2) with
        unread bytes would send RST instead, and with it could destroy what was just sent."""
        if not self.channel.pending_bytes and not self.half_closed:
            self.half_closed = True
            try:
                self.channel.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # reset in between: the reader finds out

    def welcome_proof(self, job: str) -> bytes:
        return prove(self.token, "welcome", job, self.their_nonce)

    def refusal_proof(self, job: str) -> bytes:
        return prove(self.token, "refused", job, self.their_nonce) if self.token else b""


@dataclass(frozen=True)
class Tokens:
    member: bytes = field(repr=False)
    operator: bytes | None = field(repr=False, default=None)  # None: no operators


def admit(peer: Peer, hello: Hello | OpHello, job: str, tokens: Tokens) -> Refused | None:
    """Check a stranger's hello. If it holds, the peer becomes a member or an operator; else the refusal to send."""
    if hello.version != PROTOCOL_VERSION:
        return Refused(
            reason=f"version {hello.version} of the protocol, the coordinator speaks {PROTOCOL_VERSION}",
            retry=False,
            hint="install the same version of ftctl on both",
        )
    if hello.job != job:
        return Refused(
            reason=f"this is the coordinator of job {job!r}, not {hello.job[:64]!r}",
            retry=False,
            hint="correct the coordinator's address or the job's name",
        )
    if isinstance(hello, Hello):
        kind, token, purpose, name = Kind.MEMBER, tokens.member, "member-hello", hello.replica
    else:
        kind, purpose, name = Kind.OPERATOR, "operator-hello", hello.principal
        if tokens.operator is None:
            return Refused(
                reason="this coordinator takes no operators: it was started without an operator token",
                retry=False,
                hint="start ftar-coordinator with --operator-token-file FILE",
            )
        token = tokens.operator
    if not proved(token, purpose, job, peer.my_nonce, hello.proof):
        return Refused(
            reason=f"wrong {'job' if kind is Kind.MEMBER else 'operator'} token for job {job!r}",
            retry=False,
            hint="both sides must read the same token file",
        )
    peer.token, peer.their_nonce = token, hello.client_nonce
    if kind is Kind.MEMBER and not valid_name(name):
        return Refused(reason=f"{name[:64]!r} is not a valid name for a replica", retry=False)
    if kind is Kind.OPERATOR and not (0 < len(name) <= 128 and name.isprintable()):
        return Refused(reason="a principal's name has 1 to 128 printable characters", retry=False)
    peer.kind, peer.name = kind, name
    peer.channel.parser.limit = FRAME_LIMIT
    return None


def hand_out(frame: bytes, peers: Sequence[Peer]) -> list[Peer]:
    """The same to all, in one call without the interpreter, so that a commit to a thousand members is soon at the last
    of them. Returns those that could not take all of it."""
    core = getattr(native, "core", None)
    if core is None:  # a coordinator does without the native core where there is none
        for peer in peers:
            peer.channel.send_frame(frame)
        return [peer for peer in peers if peer.channel.broken or peer.channel.pending_bytes]
    rest = core.fan_out([peer.channel.clear for peer in peers], frame)
    for place, taken in rest:
        peers[place].channel.send_rest(frame, taken)
    return [peers[place] for place, _ in rest]


def part(peers: Collection[Peer], clock: Clock) -> None:
    """Let every peer have what was said to it, for FAREWELL_S at most, and close them all; strangers at once."""
    give_up = clock.now() + FAREWELL_S
    with selectors.DefaultSelector() as leaving:
        for peer in peers:
            if peer.kind is Kind.STRANGER:
                continue
            peer.half_close()
            write = selectors.EVENT_WRITE if peer.channel.pending_bytes else 0
            leaving.register(peer.channel.sock, selectors.EVENT_READ | write, peer)
        while leaving.get_map() and clock.now() < give_up:
            for key, _mask in leaving.select(max(0.0, give_up - clock.now())):
                peer = key.data
                peer.channel.flush()
                peer.channel.receive()
                peer.half_close()
                if peer.channel.broken:
                    leaving.unregister(peer.channel.sock)
                elif not peer.channel.pending_bytes:
                    leaving.modify(peer.channel.sock, selectors.EVENT_READ, peer)
    for peer in peers:
        peer.channel.close()


class StrangerLog:
    """Says what to log about a dropped stranger: the first time for an address, then rarely, with a count."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}  # address -> (last logged, kept quiet since)

    def note(self, address: str, why: str, now: float) -> str | None:
        host = address.rpartition(":")[0] or address
        last, quiet = self._seen.pop(host, (None, 0))
        if last is not None and now - last < STRANGER_LOG_S:
            self._seen[host] = (last, quiet + 1)
            return None
        self._seen[host] = (now, 0)
        if len(self._seen) > _ADDRESSES_KEPT:
            for old in list(islice(self._seen, _ADDRESSES_KEPT // 2)):
                del self._seen[old]
        more = f" ({quiet} more from there since the last such line)" if quiet else ""
        return f"stranger from {address} dropped: {why}{more}"
