"""Whatever strangers do on a rank's ports, the ranks go on reducing."""

from __future__ import annotations

import random
import socket
import struct
import time

import numpy as np
import pytest

from ftar_core.native import core

from .cluster import LOOPBACK, Cluster, options


def works(cluster: Cluster, epoch: bytes, step: int) -> None:
    sources = [np.arange(20_000, dtype=np.float32) + i for i in range(2)]
    for result in cluster.all_reduce(epoch, step, 0, sources, "float32"):
        assert (result == sources[0] + sources[1]).all()


def undisturbed(cluster: Cluster) -> None:
    links = [link for i in range(2) for link in cluster.links(i)]
    assert all(link["state"] == "UP" and link["flaps"] == 0 and link["resumes"] == 0 for link in links)


def closed(sock: socket.socket) -> bool:
    """By the far end, sooner or later."""
    sock.settimeout(60)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("junk", ["random", "http", "hello-prefix", "huge-length", "right-size-wrong-proof"])
def test_junk_ends_its_own_connection_only(junk: str) -> None:
    rng = random.Random(junk)
    payload = {
        "random": rng.randbytes(5000),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "hello-prefix": struct.pack("<4sHH", b"FTLH", 3, 0),
        "huge-length": struct.pack("<4sHH", b"FTLH", 3, 65535) + rng.randbytes(2000),
        "right-size-wrong-proof": struct.pack("<4sHH", b"FTLH", 3, 100) + rng.randbytes(100),
    }[junk]
    with Cluster(2) as cluster:
        epoch = cluster.start()
        for i in range(2):
            for _, address, port in cluster.engines[i].endpoints():
                with socket.create_connection((address, port), timeout=60) as stranger:
                    stranger.sendall(payload)
                    assert closed(stranger)
        works(cluster, epoch, 1)
        undisturbed(cluster)


def test_a_port_scan_and_a_crowd_of_silent_connections() -> None:
    with Cluster(2, handshake_ms=200) as cluster:
        epoch = cluster.start()
        _, address, port = cluster.engines[0].endpoints()[0]
        for _ in range(50):
            socket.create_connection((address, port), timeout=60).close()
        crowd = [socket.create_connection((address, port), timeout=60) for _ in range(300)]
        works(cluster, epoch, 1)
        for step in range(2, 5):  # a new ring can be made in the crowd
            works(cluster, cluster.start(), step)
        assert all(closed(s) for s in crowd), "half-open connections are dropped after handshake_ms"
        for s in crowd:
            s.close()
        undisturbed(cluster)


def test_another_token_is_refused_at_both_ends() -> None:
    with Cluster(2) as cluster:
        epoch = cluster.start()
        other = core.Engine("job", b"wrong", "r0", 1, LOOPBACK, options())
        try:
            members = [{"name": "r0", "incarnation": 1, "rails": other.endpoints()}, cluster.member(1)]
            other.prepare(bytes(16), members, 0)
            time.sleep(0.2)
            assert not any(e["type"] == "ready" for e in other.events())
            assert {link["state"] for link in other.links()} <= {"PROBING", "DOWN"}
        finally:
            other.close()
        works(cluster, epoch, 1)
        undisturbed(cluster)


def test_an_old_incarnation_is_refused() -> None:
    with Cluster(2) as cluster:
        epoch = cluster.start()
        old = core.Engine("job", b"secret", "r0", 77, LOOPBACK, options())
        try:
            old.prepare(epoch, [{"name": "r0", "incarnation": 77, "rails": old.endpoints()}, cluster.member(1)], 0)
            deadline = time.monotonic() + 90
            wanted = "refused: incarnation 77 of r0 is not in this epoch (127.0.0.1)"
            while wanted not in {link["reason"] for link in old.links()}:
                assert time.monotonic() < deadline, old.links()
                time.sleep(0.01)
        finally:
            old.close()
        works(cluster, epoch, 1)
        undisturbed(cluster)


def test_forged_heartbeats_and_datagrams_of_any_size() -> None:
    rng = random.Random(3)
    with Cluster(2) as cluster:
        epoch = cluster.start()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for _, address, port in cluster.engines[0].endpoints():
                for size in [0, 1, 31, 32, 55, 56, 57, 528, 529, 1400]:
                    udp.sendto(rng.randbytes(size), (address, port))
                for kind in (1, 2, 3):  # the right form, without the key: 3 would be a goodbye
                    for count in (0, 1, 60, 61, 255):
                        forged = struct.pack("<4sBBBB", b"FTLB", 3, kind, count, 0) + rng.randbytes(40 + 8 * count)
                        udp.sendto(forged, (address, port))
        works(cluster, epoch, 1)
        undisturbed(cluster)


def test_many_members_of_unknown_epochs_wait_within_a_bound() -> None:
    with Cluster(2) as cluster:
        epoch = cluster.start()
        eager = [core.Engine("job", b"secret", "r9", 1, LOOPBACK, options()) for _ in range(3)]
        try:
            for engine in eager:
                for number in range(16):
                    members = [{"name": "r9", "incarnation": 1, "rails": engine.endpoints()}, cluster.member(1)]
                    engine.prepare(bytes([number] * 16), members, 0)
            deadline = time.monotonic() + 90
            while not any("too many connections" in li["reason"] for e in eager for li in e.links()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            works(cluster, epoch, 1)
            works(cluster, cluster.start(), 2)
        finally:
            for engine in eager:
                engine.close()
