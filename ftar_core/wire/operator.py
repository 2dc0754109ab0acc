"""An operator's connection to the coordinator: blocking, synchronous, with a deadline on everything.

Used by agents on behalf of a principal. Both sides prove that they know the operator token (messages.py), so a program
that sits on the coordinator's port without the token is found out before any request is sent to it.

A request whose answer does not come in time may or may not have been carried out; the connection is then closed, so
that a late answer can never be taken for that of the next request. Nothing is sent twice by this class.
"""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import TypeVar

from ftar_core.errors import AuthError, ProtocolRefused, WireError
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FRAME_LIMIT, FrameParser, encode, from_coordinator, nonce, prove, proved
from ftar_core.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    FromCoordinator,
    Message,
    OpHello,
    OpReply,
    OpRequest,
    Refused,
    Welcome,
)

M = TypeVar("M", bound=Message)


class OperatorClient:
    """Connects on the first request and again when the connection was lost between two requests. Thread-safe.

    Errors of `connect` and `request`:
      AuthError        one of the two sides does not know the operator token
      ProtocolRefused  the coordinator runs another job or speaks another version, or refuses this connection
      WireError        what answers on this address is no coordinator
      TimeoutError     no answer within `timeout_s`; a request that was sent may have been carried out
      OSError          nobody listens there, or the connection broke; the same holds
    """

    def __init__(  # noqa: PLR0917
        self, host: str, port: int, job: str, token: bytes, principal: str, timeout_s: float = 5.0
    ) -> None:
        self.address = Address(host, port)
        self._job = job
        self._token = token
        self._principal = principal
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._parser: FrameParser[FromCoordinator] = FrameParser(from_coordinator)
        self._waiting: list[FromCoordinator] = []
        self._last_id = 0
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Connect and shake hands now, instead of with the first request."""
        with self._lock:
            self._connect(time.monotonic() + self._timeout_s)

    def request(
        self,
        op: str,
        *,
        replica: str = "",
        reason: str = "",
        rejoin: bool = True,
        force: bool = False,
        after: int = 0,
        dry_run: bool = False,
        incident: str = "",
        injected: bool = False,
        max_share: float = 0.0,
        timeout_s: float | None = None,
    ) -> OpReply:
        """Ask the coordinator (OpRequest says what the fields mean) and wait for its answer."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            self._connect(deadline)
            self._last_id += 1
            asked = OpRequest(
                id=self._last_id,
                op=op,
                replica=replica,
                reason=reason,
                rejoin=rejoin,
                force=force,
                after=after,
                dry_run=dry_run,
                incident=incident,
                injected=injected,
                max_share=max_share,
            )
            try:
                self._send(asked, deadline)
                while True:
                    reply = self._expect(OpReply, deadline)
                    if reply.id == asked.id:
                        return reply
            except BaseException:
                self._drop()
                raise

    def close(self) -> None:
        with self._lock:
            self._drop()

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the connection --------------------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        if self._socket is not None and self._stale(self._socket):
            self._drop()
        if self._socket is not None:
            return
        self._parser = FrameParser(from_coordinator)
        self._waiting.clear()
        try:
            self._socket = socket.create_connection(self.address, timeout=_left(deadline, self.address))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._handshake(deadline)
        except BaseException:
            self._drop()
            raise

    def _handshake(self, deadline: float) -> None:
        challenge = self._expect(Challenge, deadline)
        if challenge.version != PROTOCOL_VERSION:
            raise ProtocolRefused(
                f"the coordinator at {self.address} speaks version {challenge.version} of the protocol,"
                f" this agent version {PROTOCOL_VERSION}",
                hint="install the same version of ftctl on both",
            )
        if challenge.job != self._job:
            raise ProtocolRefused(
                f"the coordinator at {self.address} runs job {challenge.job!r}, not {self._job!r}",
                hint="correct the coordinator's address or the job's name in the agent's configuration",
            )
        mine = nonce()
        hello = OpHello(
            job=self._job,
            principal=self._principal,
            client_nonce=mine,
            proof=prove(self._token, "operator-hello", self._job, challenge.nonce),
        )
        self._send(hello, deadline)
        welcome = self._expect(Welcome, deadline)
        if not proved(self._token, "welcome", self._job, mine, welcome.proof):
            raise AuthError(
                f"what answers at {self.address} does not know the operator token of job {self._job!r}",
                hint="make sure that the coordinator runs there and that both read the same operator token",
            )
        self._parser.limit = FRAME_LIMIT

    def _send(self, message: Message, deadline: float) -> None:
        sock = self._connected()
        sock.settimeout(_left(deadline, self.address))
        sock.sendall(encode(message))

    def _expect(self, kind: type[M], deadline: float) -> M:
        """The next message, which must be of this kind. A Refused is raised as what it means."""
        sock = self._connected()
        while not self._waiting:
            sock.settimeout(_left(deadline, self.address))
            try:
                data = sock.recv(65536)
            except TimeoutError:
                raise _late(self.address) from None
            if not data:
                raise ConnectionResetError(f"the coordinator at {self.address} closed the connection")
            self._waiting += self._parser.feed(data)
        message = self._waiting.pop(0)
        if isinstance(message, kind):
            return message
        if isinstance(message, Refused):
            if message.retry:
                raise ProtocolRefused(f"the coordinator at {self.address} refuses: {message.reason}", hint=message.hint)
            raise AuthError(f"the coordinator at {self.address} refuses: {message.reason}", hint=message.hint)
        name = type(message).__name__
        raise WireError(f"{self.address} sent a {name} where a {kind.__name__} was expected")

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError(f"not connected to the coordinator at {self.address}")
        return self._socket

    def _stale(self, sock: socket.socket) -> bool:
        """Between two requests the coordinator says nothing: anything to read means that it closed, or went mad."""
        try:
            sock.settimeout(0)
            sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _left(deadline: float, address: Address) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _late(address)
    return left


def _late(address: Address) -> TimeoutError:
    return TimeoutError(f"the coordinator at {address} did not answer in time")


__all__ = ["OperatorClient"]
