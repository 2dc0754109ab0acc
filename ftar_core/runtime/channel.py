"""A non-blocking TCP socket that carries frames both ways: the one place where control bytes meet a socket.

Used by both ends of the control connection. Bounded in both directions: the parser bounds what a sender can make us
keep, WRITE_CAP_BYTES what a slow reader can. Vanished hosts (no FIN, no RST) are noticed by TCP itself: unacknowledged
data within TCP_USER_TIMEOUT (tcp(7), RFC 5482), silence by keep-alive probes. Both are slow on purpose: they are the
last resort behind heartbeats, and a rail that flaps for a few seconds must not cost the control connection.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from ftar_core.errors import WireError
from ftar_core.runtime.forks import not_in_children
from ftar_core.wire.codec import FrameParser, encode

T = TypeVar("T")
READ_CHUNK_BYTES = 64 * 1024  # more would be a mapping of fresh pages at every call
# A member's largest message is a few KiB; one that is a thousand messages behind does not read any more.
WRITE_CAP_BYTES = 8 * 1024 * 1024
USER_TIMEOUT_MS = 10_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2, 3


def tune(sock: socket.socket) -> None:
    """Non-blocking, no Nagle delay, and an end in bounded time when the other host vanishes. A Unix socket has neither:
    both ends are the kernel's of one host."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        option = getattr(socket, name, None)  # Linux has them all; elsewhere heartbeats have to do
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Channel(Generic[T]):
    """Owns `sock`. Once `broken` is not empty (it says why), nothing is sent or received any more.

    A failed write alone does not set it: what the other side said before it went (a last commit, a refusal) may still
    lie in the receive buffer, and the reader comes to the end of it by itself.
    """

    def __init__(self, sock: socket.socket, parser: FrameParser[T]) -> None:
        tune(sock)
        not_in_children(sock)
        self.sock = sock
        self.parser = parser
        self.broken = ""
        self.clear = sock.fileno()  # -1 while bytes wait, and once it takes none: then `send_frame` knows what to do
        self._out = bytearray()
        self._deaf = False  # the other side takes nothing any more

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted by `send` that the kernel has not taken yet."""
        return len(self._out)

    def receive(self) -> list[T]:
        """What has arrived, up to READ_CHUNK_BYTES a call (so that one talker cannot starve the others)."""
        if self.broken:
            return []
        try:
            data = self.sock.recv(READ_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            self.broken = f"connection lost: {error.strerror or error}"
            return []
        if not data:
            self.broken = "connection closed by the other side"
            return []
        return self._parsed(data)

    def incoming(self) -> Iterator[T]:
        """As `receive`; what follows on a message that proves its sender may be as long as `parser.limit` is then."""
        messages = self.receive()
        while messages:
            yield from messages
            messages = self.rest()

    def rest(self) -> list[T]:
        """What has arrived behind a message that was followed by one longer than the limit of then."""
        return self._parsed(b"") if self.parser.begun and not self.broken else []

    def _parsed(self, data: bytes) -> list[T]:
        try:
            return self.parser.feed(data)
        except WireError as error:
            self.broken = str(error)
            return []

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message and give the kernel what it takes now."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """The same for an encoded message: what goes to many is encoded once."""
        if self.broken or self._deaf:
            return
        if not self._out:  # nearly always: the kernel takes it all, and nothing is copied here
            try:
                sent = self.sock.send(frame)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._turn_deaf()
                return
            if sent == len(frame):
                return
            frame = frame[sent:]
            self.clear = -1
        if len(self._out) + len(frame) > WRITE_CAP_BYTES:
            self.broken = f"it does not read: {len(self._out)} bytes are waiting for it"
            return
        self._out += frame
        self.flush()

    def send_rest(self, frame: bytes, taken: int) -> None:
        """What core.fan_out, given `clear`, has left of an encoded message: it says how many bytes were taken."""
        if self.clear < 0 or taken == 0:
            self.send_frame(frame)
        elif taken < 0:
            self._turn_deaf()
        else:
            self.clear = -1
            self._out += frame[taken:]

    def _turn_deaf(self) -> None:
        self._deaf, self.clear = True, -1
        self._out.clear()

    def flush(self) -> None:
        """Give the kernel what it takes now; call when the socket is writable and `pending_bytes` is not 0."""
        while self._out and not self.broken:
            try:
                sent = self.sock.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._turn_deaf()
                return
            del self._out[:sent]
            if not self._out:
                self.clear = self.sock.fileno()

    def close(self) -> None:
        if not self.broken:
            self.broken = "closed"
        self.clear = -1
        self.sock.close()
