"""What a shadow and a state server say to each other, and how the bytes of tensors follow.

    server -> StateChallenge                       a stranger who cannot answer is dropped after STRANGER_S
    shadow -> StateHello (proof)
    server -> StateWelcome (proof) | StateRefused
    shadow -> Subscribe                            new, or the same again over another rail, with where to go on
    server -> Offer, chunks ..., StateEnd          the snapshot (left out when the shadow already holds that step)
    server -> StepData, chunks ...                 after each commit; the shadow answers Kept
    server -> Alive                                whenever it has said nothing else for ALIVE_S

A chunk is a `Chunk` frame and then `size` raw bytes, checked by CRC-32. Messages are bounded msgspec frames; the raw
bytes are bounded by what the Offer announced. Nothing is unpickled."""

from __future__ import annotations

import socket
import time
import zlib

import msgspec
import torch

from ftar_core.errors import WireError
from ftar_core.training.state import TensorInfo, raw_bytes
from ftar_core.wire.codec import FRAME_LIMIT, LENGTH, STRANGER_LIMIT, encode
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Deal, Message, Verdict

PURPOSE_HELLO, PURPOSE_WELCOME = "state-hello", "state-welcome"
CHUNK_BYTES = 1024 * 1024
ALIVE_S = 0.5
# Six missed signs of life: a shadow may wait longer than a rail, whose death the native links notice in milliseconds,
# because nobody waits for it; and a source whose interpreter is busy is not dead.
SILENCE_S = 3.0
STRANGER_S = 3.0
KEPT_S = 15.0  # how long a source waits for Kept, and keeps a subscription whose connection was lost


class StateChallenge(Message, frozen=True):
    job: str
    nonce: bytes


class StateHello(Message, frozen=True):
    job: str
    replica: str
    incarnation: int
    nonce: bytes
    proof: bytes


class StateWelcome(Message, frozen=True):
    proof: bytes


class StateRefused(Message, frozen=True):
    reason: str


class Subscribe(Message, frozen=True):
    """`id` (16 bytes) names the subscription over all its connections. `have` is the step whose state the shadow holds
    (-1: none). To go on after a lost connection: `tensor` and `offset` of the next snapshot byte, or, with the snapshot
    complete, `next_step` of the stream."""

    id: bytes
    plan: str
    have: int
    tensor: int = 0
    offset: int = 0
    next_step: int = 0


class Offer(Message, frozen=True):
    """The state after `step`, committed in `epoch`. Without tensors: the shadow holds it already."""

    step: int
    epoch: EpochId
    skeleton: bytes
    tensors: tuple[TensorInfo, ...]


class Chunk(Message, frozen=True):
    """`size` raw bytes follow this frame: bytes [offset, offset + size) of tensor or bucket `index`."""

    index: int
    offset: int
    size: int
    crc: int


class StateEnd(Message, frozen=True):
    step: int


class StepData(Message, frozen=True):
    """A committed step. Its averaged buckets follow as chunks (none when nobody updates); `sizes` in bytes. `deal`: of
    the step behind it."""

    step: int
    epoch: EpochId
    verdict: Verdict
    contributors: tuple[str, ...]
    sizes: tuple[int, ...]
    deal: Deal | None = None


class Kept(Message, frozen=True):
    """The shadow keeps everything up to this step."""

    step: int


class Alive(Message, frozen=True):
    """Nothing to send; `text` says what the shadow waits for."""

    text: str = ""


class Cut(Message, frozen=True):
    """The subscription is over. `again`: take a newer snapshot here; else ask another source."""

    reason: str
    again: bool


StateMessage = (
    StateChallenge
    | StateHello
    | StateWelcome
    | StateRefused
    | Subscribe
    | Offer
    | Chunk
    | StateEnd
    | StepData
    | Kept
    | Alive
    | Cut
)
_decoder: msgspec.msgpack.Decoder[StateMessage] = msgspec.msgpack.Decoder(StateMessage)


class StateConnection:
    """Blocking frames and chunks over one socket, each call within a time limit. Every failure is an OSError or a
    WireError, after which the connection is of no use. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.limit = STRANGER_LIMIT  # raised by `trust` when the other side has proved the token
        self.limit_s = STRANGER_S
        sock.settimeout(STRANGER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self, limit_s: float) -> None:
        self.limit = FRAME_LIMIT
        self.limit_s = limit_s
        self._sock.settimeout(limit_s)

    def send(self, message: Message) -> None:
        self._sock.sendall(encode(message))

    def receive(self) -> StateMessage:
        """The next message. Raises WireError for bytes that are none, TimeoutError after `limit_s` altogether."""
        deadline = time.monotonic() + self.limit_s
        head = bytearray(LENGTH.size)
        self._fill(memoryview(head), deadline)
        (size,) = LENGTH.unpack(head)
        if size == 0 or size > self.limit:
            raise WireError(f"frame of {size} bytes (1 to {self.limit} allowed)")
        body = bytearray(size)
        self._fill(memoryview(body), deadline)
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(f"not a message of the state protocol: {error}") from None

    def send_tensor(self, index: int, tensor: torch.Tensor, offset: int = 0) -> None:
        """All bytes of a contiguous host tensor from `offset` on, in chunks."""
        data = raw_bytes(tensor)
        for start in range(offset, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            header = encode(Chunk(index=index, offset=start, size=len(part), crc=zlib.crc32(part)))
            self._sock.sendall(header)
            self._sock.sendall(part)

    def receive_chunk(self, chunk: Chunk, target: memoryview) -> None:
        """The raw bytes of `chunk` into `target`, the whole tensor's memory. Raises WireError if they do not fit there
        or were damaged on the way."""
        if chunk.offset < 0 or not 0 < chunk.size <= CHUNK_BYTES or chunk.offset + chunk.size > len(target):
            raise WireError(f"chunk [{chunk.offset}, +{chunk.size}] outside of {len(target)} bytes")
        part = target[chunk.offset : chunk.offset + chunk.size]
        self._fill(part, time.monotonic() + self.limit_s)
        if zlib.crc32(part) != chunk.crc:
            raise WireError(f"chunk {chunk.index} at {chunk.offset}: checksum does not match")

    def _fill(self, target: memoryview, deadline: float) -> None:
        done = 0
        while done < len(target):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"nothing within {self.limit_s:g} s")
            self._sock.settimeout(left_s)
            count = self._sock.recv_into(target[done:])
            if count == 0:
                raise ConnectionError("closed by the other side")
            done += count
        self._sock.settimeout(self.limit_s)

    def close(self) -> None:
        self._sock.close()

    def shutdown(self) -> None:
        """From another thread: make a blocking call of the owner fail."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
