"""One connection of the state protocol: frames, and raw bytes straight into and out of the memory of tensors.

The socket blocks and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO), so that a whole chunk is one system call
during which the interpreter is free: Python's own time-outs would make it poll, and take the interpreter's lock again,
for every few packets. A training thread beside it must not feel a state being served."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

import msgspec
import torch

from ftar_core.errors import WireError
from ftar_core.native import core
from ftar_core.runtime.forks import not_in_children
from ftar_core.runtime.rails import Rail
from ftar_core.training.state import raw_bytes
from ftar_core.training.statewire import CHUNK_BYTES, STRANGER_S, Chunk, StateMessage, state_message
from ftar_core.wire.codec import FRAME_LIMIT, LENGTH, STRANGER_LIMIT, encode
from ftar_core.wire.messages import Message

BUFFERS_A_CALL = 512  # the kernel takes up to 1024 (IOV_MAX)
_TIMEVAL = struct.Struct("@ll")


def checksum(buffers: Sequence[memoryview]) -> int:
    """64-bit checksum over these bytes; it depends on where one buffer ends and the next begins."""
    return core.digest_of(buffers)


class StateConnection:
    """Blocking frames and chunks over one socket, each call within a time limit. Every failure is an OSError or a
    WireError, after which the connection is of no use. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.limit = STRANGER_LIMIT  # raised by `trust` when the other side has proved the token
        self.limit_s = STRANGER_S
        self._trusted = False
        self._timeout_s = 0.0
        sock.settimeout(None)
        self._time_limit(STRANGER_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self, limit_s: float) -> None:
        """The other side knows the token: from now on the limit is on silence, not on a whole message."""
        self.limit = FRAME_LIMIT
        self.limit_s = limit_s
        self._trusted = True

    def _time_limit(self, limit_s: float) -> None:
        if limit_s == self._timeout_s:
            return
        value = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1e6) or (0 if limit_s >= 1 else 1))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = limit_s

    # --- out

    def send(self, message: Message) -> None:
        self._write([memoryview(encode(message))])

    def send_chunk(self, header: Chunk, buffers: Sequence[memoryview]) -> None:
        self._write([memoryview(encode(header)), *buffers])

    def send_tensor(self, index: int, tensor: torch.Tensor) -> None:
        """All bytes of a contiguous host tensor, in chunks."""
        data = raw_bytes(tensor)
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            self.send_chunk(Chunk(index=index, offset=start, size=len(part), sum=checksum([part])), [part])

    def _write(self, buffers: list[memoryview]) -> None:
        deadline = time.monotonic() + self.limit_s
        while buffers:
            self._time_limit(self._left(deadline))
            try:
                count = self._sock.sendmsg(buffers[:BUFFERS_A_CALL])
            except BlockingIOError:
                raise TimeoutError(f"nothing was taken within {self.limit_s:g} s") from None
            buffers = _without(buffers, count)

    # --- in

    def receive(self) -> StateMessage:
        """The next message. Raises WireError for bytes that are none, TimeoutError after `limit_s`: of a stranger
        altogether, else without a byte."""
        deadline = time.monotonic() + self.limit_s
        head = bytearray(LENGTH.size)
        self._read([memoryview(head)], deadline)
        (size,) = LENGTH.unpack(head)
        if size == 0 or size > self.limit:
            raise WireError(f"frame of {size} bytes (1 to {self.limit} allowed)")
        body = bytearray(size)
        self._read([memoryview(body)], deadline)
        try:
            return state_message.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(f"not a message of the state protocol: {error}") from None

    def receive_bytes(self, chunk: Chunk, target: Sequence[memoryview]) -> bool:
        """The raw bytes behind `chunk` into `target`, which is of its size. False if they were damaged on the way; the
        connection is good for more. The checksum is made in the same pass, of what is still in the cache."""
        if not self._trusted:
            raise WireError("raw bytes of a stranger")
        if chunk.size != sum(len(buffer) for buffer in target):
            raise WireError(f"chunk {chunk.index} of {chunk.size} bytes: another size is expected")
        self._time_limit(self.limit_s)
        try:
            return core.receive_into(self._sock.fileno(), target) == chunk.sum
        except TimeoutError:
            raise TimeoutError(f"nothing within {self.limit_s:g} s") from None

    def receive_tensor(self, index: int, tensor: torch.Tensor) -> None:
        """The chunks of a whole tensor. Raises WireError if they do not come in order, or damaged."""
        memory = raw_bytes(tensor)
        done = 0
        while done < len(memory):
            chunk = self.receive()
            if not isinstance(chunk, Chunk) or (chunk.index, chunk.offset) != (index, done):
                raise WireError(f"a chunk of bucket {index} is missing")
            if not 0 < chunk.size <= min(CHUNK_BYTES, len(memory) - done):
                raise WireError(f"chunk [{done}, +{chunk.size}] outside of {len(memory)} bytes")
            if not self.receive_bytes(chunk, [memory[done : done + chunk.size]]):
                raise WireError(f"bucket {index} at {done}: checksum does not match")
            done += chunk.size

    def _read(self, buffers: list[memoryview], deadline: float) -> None:
        while buffers:
            self._time_limit(self._left(deadline))
            try:
                count = self._sock.recvmsg_into(buffers[:BUFFERS_A_CALL], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                raise TimeoutError(f"nothing within {self.limit_s:g} s") from None
            if count == 0:
                raise ConnectionError("closed by the other side")
            buffers = _without(buffers, count)

    def _left(self, deadline: float) -> float:
        if self._trusted:
            return self.limit_s
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"nothing within {self.limit_s:g} s")
        return left_s

    def close(self) -> None:
        self._sock.close()

    def shutdown(self) -> None:
        """From another thread: make a blocking call of the owner fail."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def open_socket(rail: Rail | None, family: int | None = None) -> socket.socket:
    """A TCP socket bound to the device of this rail, so that the kernel cannot move it to another NIC."""
    if family is None:
        address = rail.address if rail is not None else ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    not_in_children(sock)
    option = getattr(socket, "SO_BINDTODEVICE", None)
    if rail is not None and rail.device and option is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, rail.device.encode())
        except PermissionError:
            pass  # kernels before 5.7 want CAP_NET_RAW; the address alone then chooses the way
        except OSError:
            sock.close()
            raise
    return sock
