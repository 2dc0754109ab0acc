"""The one parser of control bytes: length-prefixed MessagePack frames, bounded.

A frame is a 4-byte little-endian length and that many bytes of MessagePack, at most `limit`. A stranger who has not
proved the token gets a small limit, so that a port scan or a forged length can cost no memory.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Generic, TypeVar

import msgspec

from ftar_core.errors import WireError
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import PROTOCOL_VERSION, FromCoordinator, Message, ToCoordinator, ToLeaderOfSeveral

LENGTH = struct.Struct("<I")
STRANGER_LIMIT = 64 * 1024
FRAME_LIMIT = 16 * 1024 * 1024

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
to_coordinator: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)
to_leader_of_several: msgspec.msgpack.Decoder[ToLeaderOfSeveral] = msgspec.msgpack.Decoder(ToLeaderOfSeveral)


def encode(message: msgspec.Struct) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class FrameParser(Generic[T]):
    """Bytes in, messages out. Raises WireError once; after that the connection must be dropped.

    A frame that is too long stops behind earlier ones of the same bytes: their reader may raise `limit` because of what
    they prove, and then asks for the rest with `feed(b"")`."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], limit: int = STRANGER_LIMIT) -> None:
        self._decoder = decoder
        self._buffer = bytearray()
        self.limit = limit

    @property
    def begun(self) -> bool:
        """Bytes are waiting that may hold a frame."""
        return len(self._buffer) > LENGTH.size

    def feed(self, data: bytes) -> list[T]:
        """Messages completed by `data`."""
        if not self._buffer and len(data) > LENGTH.size:
            (size,) = LENGTH.unpack_from(data)
            if size == len(data) - LENGTH.size and size <= self.limit:  # one whole frame, as nearly always
                return [self._decode(memoryview(data)[LENGTH.size :])]
        messages: list[T] = []
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            if size == 0 or size > self.limit:
                if messages:
                    break
                raise WireError(f"frame of {size} bytes (1 to {self.limit} allowed)")
            end = LENGTH.size + size
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            messages.append(self._decode(body))
        return messages

    def _decode(self, body: bytes | memoryview) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(_other_version(bytes(body)) or f"not a message of this protocol: {error}") from None


def _other_version(body: bytes) -> str:
    """What to say of a greeting that this version cannot read because it is of another one; empty if it is not."""
    try:
        greeting = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
    if not isinstance(greeting, dict) or greeting.get("type") not in ("Challenge", "Hello", "OpHello"):
        return ""
    version = greeting.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version == PROTOCOL_VERSION:
        return ""
    return f"it speaks version {version} of the protocol, this side {PROTOCOL_VERSION}: install the same ftctl on both"


def nonce() -> bytes:
    return secrets.token_bytes(16)


def prove(token: bytes, purpose: str, job: str, challenge: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) over purpose, job and the other side's nonce: shows knowledge of the token."""
    return hmac.new(token, b"\0".join((purpose.encode(), job.encode(), challenge)), hashlib.sha256).digest()


def vouch(nonce_sent: bytes, term: Term) -> bytes:
    """What a Challenge proves, with purpose "challenge". Replayed, it still names a term that was really claimed."""
    return b"\0".join((nonce_sent, str(term.number).encode(), term.coordinator.encode()))


def proved(token: bytes, purpose: str, job: str, challenge: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(prove(token, purpose, job, challenge), proof)


__all__ = [
    "FRAME_LIMIT",
    "LENGTH",
    "STRANGER_LIMIT",
    "FrameParser",
    "Message",
    "encode",
    "from_coordinator",
    "nonce",
    "prove",
    "proved",
    "to_coordinator",
    "to_leader_of_several",
    "vouch",
]
