"""Bytes through sockets beside the interpreter (csrc/sockets.h): what arrives, its digest, and every way to end."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ftar_core.native import core

SLICE = 256 * 1024  # what is received at a time


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def chained(parts: list[bytes]) -> int:
    """Buffer by buffer, each one's digest the seed of the next."""
    found = 0
    for part in parts:
        found = core.digest(np.frombuffer(part, np.uint8).ctypes.data, len(part), found)
    return found


@pytest.mark.parametrize("sizes", [[0], [1], [31], [32], [33], [SLICE + 1, 7, 0, 5, 2 * SLICE, 100_003]])
def test_the_digest_of_what_arrives_is_that_of_what_was_sent(
    pair: tuple[socket.socket, socket.socket], sizes: list[int]
) -> None:
    ours, theirs = pair
    parts = [os.urandom(size) for size in sizes]
    into = [memoryview(bytearray(size)) for size in sizes]
    sender = threading.Thread(target=theirs.sendall, args=(b"".join(parts),))
    sender.start()
    assert core.receive_into(ours.fileno(), into) == core.digest_of(parts) == chained(parts)
    sender.join()
    assert [bytes(part) for part in into] == parts
    if sum(sizes) > 40:
        assert core.digest_of([b"".join(parts)]) != core.digest_of(parts), "where a buffer ends counts"
    for index, part in enumerate(parts):
        if part:
            damaged = parts.copy()
            damaged[index] = bytes([part[0] ^ 1]) + part[1:]
            assert core.digest_of(damaged) != core.digest_of(parts)


def test_silence_the_end_and_a_socket_that_is_none_have_errors_of_their_own(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    into = [memoryview(bytearray(5))]
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
    theirs.sendall(b"abc")
    with pytest.raises(TimeoutError):
        core.receive_into(ours.fileno(), into)
    theirs.sendall(b"ab")
    theirs.close()
    with pytest.raises(ConnectionResetError, match="closed by the other side"):
        core.receive_into(ours.fileno(), into)
    with pytest.raises(OSError, match="Bad file descriptor"):
        core.receive_into(-1, into)
    with pytest.raises(BufferError):
        core.receive_into(ours.fileno(), [b"cannot be written"])


def test_the_same_bytes_to_many_wait_for_nobody(pair: tuple[socket.socket, socket.socket]) -> None:
    (ours, theirs), frame = pair, os.urandom(4 * SLICE)
    with socket.socket() as unconnected:
        fds = [ours.fileno(), unconnected.fileno(), -1]
        rest = dict(core.fan_out(fds, frame))
        taken = rest.pop(0)
        assert rest == {1: -1, 2: -1}
        assert 0 < taken < len(frame), "no more than the kernel has room for"
        assert dict(core.fan_out(fds[:1], frame)) == {0: 0}, "full"
    theirs.setblocking(False)
    got = b""
    while len(got) < taken:
        got += theirs.recv(1 << 20)
    assert got == frame[:taken]
    assert core.fan_out(fds[:1], b"again") == []
    theirs.close()
    assert core.fan_out(fds[:1], b"gone") == [(0, -1)], "and no signal"


def test_memory_that_is_made_ready_keeps_what_is_in_it() -> None:
    memory = np.empty(3 << 20, np.uint8)
    memory[:100] = 7
    assert core.populate(memory.ctypes.data, memory.nbytes) in (True, False)  # older kernels cannot
    assert (memory[:100] == 7).all()
    assert core.populate(0, 0)
    with pytest.raises(ValueError, match="address 0"):
        core.populate(0, 4096)
