"""Peers with another wire version are told so, at both ends, at once."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

from ftar_core.native import core

from .cluster import LOOPBACK, Cluster, options
from .nccl.abi import REMOTE
from .nccl.rig import Peer

WIRE_VERSION = 3


class OtherVersion(threading.Thread):
    """A listener that speaks version 1: it says so, and keeps what it hears."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.heard: list[bytes] = []

    def run(self) -> None:
        while True:
            try:
                conn, _ = self.socket.accept()
            except OSError:
                return
            with conn:
                conn.settimeout(60)
                conn.sendall(struct.pack("<4sHH", b"FTLC", 1, 0) + os.urandom(16))
                try:
                    self.heard.append(conn.recv(100))
                except OSError:
                    self.heard.append(b"")

    def __enter__(self) -> OtherVersion:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.join(60)


def test_a_ring_with_a_neighbour_of_another_version_breaks_with_the_reason() -> None:
    with OtherVersion() as other:
        engine = core.Engine("job", b"secret", "r0", 1, LOOPBACK, options())
        try:
            members = [
                {"name": "r0", "incarnation": 1, "rails": engine.endpoints()},
                {"name": "r1", "incarnation": 1, "rails": [("rail0", "127.0.0.1", other.port)]},
            ]
            engine.prepare(bytes(16), members, 0)  # type: ignore[arg-type]
            deadline = time.monotonic() + 90
            reasons: list[str] = []
            while not any("speaks wire version 1, this is 3" in reason for reason in reasons):
                assert time.monotonic() < deadline, reasons
                reasons += [e["reason"] for e in engine.events() if e["type"] == "peer_gone"]
                time.sleep(0.01)
        finally:
            engine.close()
    assert struct.unpack("<4sHH", other.heard[0][:8]) == (b"FTLH", WIRE_VERSION, 0), "the other end is told as well"


def say_hello_in_version(version: int, address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=60) as stranger:
        stranger.sendall(struct.pack("<4sHH", b"FTLH", version, 100) + os.urandom(100))
        stranger.settimeout(60)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass


def test_whoever_listens_hears_of_a_dialler_of_another_version_once() -> None:
    with Cluster(1) as cluster:
        _, address, port = cluster.engines[0].endpoints()[0]
        for _ in range(3):
            say_hello_in_version(1, address, port)
        event = cluster.wait(0, lambda e: e["type"] == "refused")
        assert event["peer"] == "127.0.0.1"
        assert event["reason"].startswith("speaks wire version 1, this is 3: install")
        assert cluster.types(0).count("refused") == 1


def until_said(peer: Peer, words: str) -> None:
    deadline = time.monotonic() + 90
    while not any(words in line for line in peer.ask("log")):
        assert time.monotonic() < deadline, peer.ask("log")
        time.sleep(0.01)


def test_the_plugin_says_so_at_both_ends() -> None:
    with OtherVersion() as other, Peer(FTAR_NET_BACKUP="none") as peer:
        listener, handle = peer.ask("listen", device=0)
        raw = bytes.fromhex(handle)
        port = int.from_bytes(raw[44:46], "little")
        say_hello_in_version(4, "127.0.0.1", port)
        until_said(peer, "speaks wire version 4, this is 3")
        elsewhere = raw.replace(port.to_bytes(2, "little"), other.port.to_bytes(2, "little"))
        comm = peer.ask("connect", device=0, handle=elsewhere.hex())
        peer.ask("send", comm=comm, stream=0, sizes=[1], count=1, window=1)
        deadline = time.monotonic() + 90
        while not (code := peer.ask("state")[0]["code"]):
            assert time.monotonic() < deadline
        assert code == REMOTE
        until_said(peer, "speaks wire version 1, this is 3")
        peer.ask("close", kind="listen", comm=listener)
