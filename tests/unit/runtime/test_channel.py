"""Frames over a real socket pair: torn, oversized, junk, a reader that does not read, an end in the middle."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ftar_core.native import core
from ftar_core.runtime import channel as channel_module
from ftar_core.runtime.channel import Channel
from ftar_core.wire.codec import LENGTH, STRANGER_LIMIT, FrameParser, encode, to_coordinator
from ftar_core.wire.messages import Leaving, Progress, ToCoordinator


@pytest.fixture
def ends() -> Iterator[tuple[Channel[ToCoordinator], socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    channel: Channel[ToCoordinator] = Channel(near, FrameParser(to_coordinator))
    yield channel, far
    channel.close()
    far.close()


def receive(channel: Channel[ToCoordinator]) -> list[ToCoordinator]:
    """Wait for something, then take it."""
    channel.sock.settimeout(60)
    try:
        channel.sock.recv(1, socket.MSG_PEEK)
    except OSError:
        pass
    channel.sock.setblocking(False)
    return channel.receive()


def test_a_frame_in_single_bytes(ends: tuple[Channel[ToCoordinator], socket.socket]) -> None:
    channel, far = ends
    message = Progress(state="fetching", step=7, text="50 %")
    got: list[ToCoordinator] = []
    for byte in encode(message):
        far.sendall(bytes([byte]))
        got += receive(channel)
    assert got == [message]
    assert not channel.broken


def test_what_was_sent_before_the_close_still_arrives(ends: tuple[Channel[ToCoordinator], socket.socket]) -> None:
    channel, far = ends
    far.sendall(encode(Leaving(reason="a")) + encode(Leaving(reason="b")))
    far.close()
    channel.send(Leaving(reason="nobody will read this"))  # makes the other side answer with a reset
    assert receive(channel) == [Leaving(reason="a"), Leaving(reason="b")]
    assert receive(channel) == []
    assert "connection" in channel.broken


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 16,
        LENGTH.pack(0xFFFFFFFF),
        LENGTH.pack(STRANGER_LIMIT + 1),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        LENGTH.pack(5) + b"\x81\xa4type",
    ],
)
def test_junk_breaks_the_channel_and_nothing_else(
    ends: tuple[Channel[ToCoordinator], socket.socket], junk: bytes
) -> None:
    channel, far = ends
    far.sendall(junk)
    assert receive(channel) == []
    assert channel.broken
    channel.send(Leaving(reason="dropped"))
    assert channel.pending_bytes == 0


def test_a_reader_that_does_not_read_is_given_up(
    ends: tuple[Channel[ToCoordinator], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _far = ends
    monkeypatch.setattr(channel_module, "WRITE_CAP_BYTES", 256 * 1024)
    message = Leaving(reason="x" * 10_000)
    for _ in range(10_000):
        channel.send(message)
        if channel.broken:
            break
    assert "does not read" in channel.broken
    assert channel.pending_bytes <= 256 * 1024


def test_what_is_sent_to_many_at_once_keeps_its_order_when_one_of_them_is_full(
    ends: tuple[Channel[ToCoordinator], socket.socket],
) -> None:
    channel, far = ends
    channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    messages = [Leaving(reason=str(n) + "x" * 50_000) for n in range(60)]
    for message in messages:
        frame = encode(message)
        for _, taken in core.fan_out([channel.clear], frame):
            channel.send_rest(frame, taken)
    assert channel.pending_bytes, "the kernel is full"
    assert channel.clear == -1
    parser, got = FrameParser(to_coordinator), []
    while len(got) < len(messages):
        got += parser.feed(far.recv(1 << 20))
        channel.flush()
    assert got == messages
    assert channel.clear == channel.fileno()


def test_one_that_takes_nothing_any_more_is_left_alone_and_read_to_its_end(
    ends: tuple[Channel[ToCoordinator], socket.socket],
) -> None:
    channel, far = ends
    far.sendall(encode(Leaving(reason="first")))
    channel.sock.shutdown(socket.SHUT_WR)
    ((place, taken),) = core.fan_out([channel.clear], b"for nobody")
    assert (place, taken) == (0, -1)
    channel.send_rest(b"for nobody", taken)
    assert channel.clear == -1
    assert core.fan_out([channel.clear], b"nor this") == [(0, -1)]
    channel.send_rest(b"nor this", -1)
    assert channel.pending_bytes == 0
    assert receive(channel) == [Leaving(reason="first")]
    assert not channel.broken
