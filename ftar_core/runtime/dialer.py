"""Connecting to the coordinator without ever blocking the loop: names resolved aside, one address after the other.

Attempts are spaced by a back-off that doubles from 0.1 s to 2 s, each with jitter: when a coordinator comes back, a
thousand members must not knock in the same millisecond, and 2 s is still short beside the minutes that members wait.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import selectors
import socket
import threading
from collections.abc import Callable

from ftar_core.wire.address import Address

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 2.0
SockAddr = tuple[str, int] | tuple[str, int, int, int]


class Backoff:
    """Delays before attempts: uniformly random in the upper half of 0.1, 0.2, 0.4 ... 2 s."""

    def __init__(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        ceiling = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        return max(BACKOFF_FIRST_S, random.uniform(ceiling / 2, ceiling))

    def reset(self) -> None:
        self._failures = 0


class Dialer:
    """One attempt to connect. Calls `connected(socket)` or `failed(why)` once, from the loop's thread, unless `close`d.

    `call` hands a function to the loop's thread from another one.
    """

    def __init__(
        self,
        address: Address,
        selector: selectors.BaseSelector,
        call: Callable[[Callable[[], None]], None],
        connected: Callable[[socket.socket], None],
        failed: Callable[[str], None],
    ) -> None:
        self._address = address
        self._selector = selector
        self._call = call
        self._connected = connected
        self._failed = failed
        self._candidates: list[tuple[socket.AddressFamily, SockAddr]] = []
        self._sock: socket.socket | None = None
        self._closed = False
        self._why = "no address"

    def start(self) -> None:
        try:
            ip = ipaddress.ip_address(self._address.host)
        except ValueError:
            threading.Thread(target=self._resolve, name="ftar-resolve", daemon=True).start()
            return
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        self._candidates = [(family, (str(ip), self._address.port))]
        self._try_next()

    def close(self) -> None:
        self._closed = True
        self._forget()

    def _resolve(self) -> None:
        """In a thread of its own: the resolver may block for many seconds."""
        try:
            found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
            candidates: list[tuple[socket.AddressFamily, SockAddr]] = [(entry[0], entry[4]) for entry in found]  # type: ignore[misc]
            why = "no address"
        except OSError as error:
            candidates, why = [], f"cannot resolve {self._address.host}: {error.strerror or error}"

        def resolved() -> None:
            self._candidates, self._why = candidates, why
            self._try_next()

        self._call(resolved)

    def _try_next(self) -> None:
        while not self._closed:
            if not self._candidates:
                self._closed = True
                self._failed(self._why)
                return
            family, target = self._candidates.pop(0)
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                code = sock.connect_ex(target)
            except OSError as error:
                code = error.errno or errno.EINVAL
            if code in {0, errno.EINPROGRESS}:
                self._sock = sock
                self._selector.register(sock, selectors.EVENT_WRITE, self._writable)
                return
            sock.close()
            self._why = os.strerror(code)

    def _writable(self, _mask: int) -> None:
        sock = self._sock
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # With nobody listening on an ephemeral port, the kernel may connect a socket to itself.
        if code == 0 and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED
        if code != 0:
            self._forget()
            self._why = os.strerror(code)
            self._try_next()
            return
        self._selector.unregister(sock)
        self._sock = None
        self._closed = True
        self._connected(sock)

    def _forget(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
