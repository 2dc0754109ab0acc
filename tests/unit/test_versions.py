"""Greetings of another version: said as such, whatever else they hold."""

from __future__ import annotations

import msgspec
import pytest

from ftar_core.errors import WireError
from ftar_core.wire.codec import LENGTH, FrameParser, from_coordinator, to_coordinator
from ftar_core.wire.messages import PROTOCOL_VERSION


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


@pytest.mark.parametrize("kind", ["Hello", "OpHello"])
def test_a_hello_of_another_version_names_both_versions(kind: str) -> None:
    theirs = {"type": kind, "version": PROTOCOL_VERSION + 1, "job": "demo", "a field of tomorrow": [1, 2]}
    with pytest.raises(WireError, match=f"it speaks version {PROTOCOL_VERSION + 1} of the protocol, this side"):
        FrameParser(to_coordinator).feed(frame(theirs))


def test_so_does_a_challenge() -> None:
    theirs = {"type": "Challenge", "version": PROTOCOL_VERSION + 7, "salt": b"x"}
    with pytest.raises(WireError, match="install the same ftctl on both"):
        FrameParser(from_coordinator).feed(frame(theirs))


@pytest.mark.parametrize(
    "strange",
    [
        {"type": "Hello", "version": "2"},
        {"type": "Done", "version": 9},
        ["Hello"],
        {"type": "Hello", "version": True},
        7,
    ],
)
def test_what_is_no_greeting_is_no_message(strange: object) -> None:
    with pytest.raises(WireError, match="not a message of this protocol"):
        FrameParser(to_coordinator).feed(frame(strange))
