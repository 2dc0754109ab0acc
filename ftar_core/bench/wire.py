"""`wire`: what the bytes of a ring all-reduce cost with nothing around them.

Each rank sends a segment to the next rank and receives one from the previous, 2(n-1) times, over one plain TCP
connection each way: the traffic of reduce-scatter and all-gather without a sum, an acknowledgement, a heartbeat or a
second rail. It is written in Python, which costs some 20 us a round: at small sizes that is Python's figure, not the
wire's; from about 1 MB on it is the kernel's.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from functools import partial


class WireRing:
    """`out` goes to the next rank, `into` comes from the previous; both are connected TCP sockets."""

    def __init__(self, ranks: int, out: socket.socket, into: socket.socket) -> None:
        self._ranks, self._out, self._into = ranks, out, into
        for end in (out, into):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()

    def run(self, send: memoryview, receive: memoryview) -> None:
        """One all-reduce's worth of bytes. `send` and `receive` have the size of the buffer, in bytes."""
        size = max(1, len(send) // self._ranks)
        for _ in range(2 * (self._ranks - 1)):
            self._exchange(send[:size], receive[:size])

    def _exchange(self, send: memoryview, receive: memoryview) -> None:
        while send or receive:
            moved = 0
            if send:
                sent = _tried(partial(self._out.send, send))
                send, moved = send[sent:], moved + sent
            if receive:
                got = _tried(partial(self._receive, receive))
                receive, moved = receive[got:], moved + got
            if moved == 0:
                self._wait(bool(send), bool(receive))

    def _receive(self, into: memoryview) -> int:
        got = self._into.recv_into(into)
        if got == 0:
            raise ConnectionError("the previous rank has closed its connection")
        return got

    def _wait(self, sending: bool, receiving: bool) -> None:
        for end, mask, wanted in ((self._out, select.POLLOUT, sending), (self._into, select.POLLIN, receiving)):
            if wanted:
                self._poll.register(end, mask)
        self._poll.poll()
        for end, wanted in ((self._out, sending), (self._into, receiving)):
            if wanted:
                self._poll.unregister(end)


def _tried(call: Callable[[], int]) -> int:
    """Bytes moved; 0 if the socket is not ready."""
    try:
        return call()
    except BlockingIOError:
        return 0
