"""Ranks on their leader's node use its Unix socket, others TCP; whatever is wrong with the one, the other is there."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ports import claim_port

from ftar_core.bench.network import Network
from ftar_core.runtime import assembly
from ftar_core.runtime import follower as follower_module
from ftar_core.runtime.nearby import dial_near, listen_near, name_of, trusted
from ftar_core.runtime.rails import Rail
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FrameParser, encode, nonce, prove
from ftar_core.wire.team import FromLeader, RankHello, TeamChallenge, TeamWelcome, from_leader

from .test_ranks import Replica, info

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs other users or network namespaces")


@pytest.fixture
def replica(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Replica]]:
    caplog.set_level(logging.INFO, "ftar.team")
    made: list[Replica] = []

    def make(size: int = 2, **common: Any) -> Replica:
        made.append(Replica(size, **common))
        return made[-1]

    yield make
    for one in made:
        one.close()


def way(caplog: pytest.LogCaptureFixture) -> str:
    """What the leader says when all are here."""
    return next(text.partition(": ")[2] for text in caplog.messages if "ranks are here" in text)


def fixed() -> Address:
    return Address("127.0.0.1", claim_port())


def squatter(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(name_of(address))
    sock.listen(0)
    return sock


# --- which way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("common", [{}, {"master": Address("localhost", 29500)}, {"leader": fixed()}])
def test_ranks_on_their_leader_s_node_use_its_unix_socket(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture, common: dict[str, Any]
) -> None:
    r = replica(3, **common)
    ranks = r.together()
    assert way(caplog) == "2 ranks are here, 2 of them over the Unix socket"
    for _, delegate in ranks:
        assert delegate.until("welcomed")[1] == "127.0.0.1", "its heartbeats need an address all the same"


@needs_root
@pytest.mark.root
def test_a_rank_in_another_network_namespace_uses_tcp(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """As one on another node does, or in a container with a network of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # a process that stays in a namespace of its own
        try:
            os.write(writer, json.dumps(play(replica, caplog)).encode())
        except BaseException as error:
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert said == ["2 ranks are here, 1 of them over the Unix socket", "10.79.0.1", "10.79.0.1"], "both beat to it"


def play(replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture) -> list[str]:
    """A leader on node 0 with a rank beside it and one on node 1: how many came which way, and where they beat to."""
    with Network((0,), nodes=2) as network:
        with network.inside(0):
            r = replica(3, rails=(Rail("rail0", "rail0", network.addresses[0][0]),))
            starting = r.start_leader()
            (beside, first), (away, second) = r.follower(1), r.follower(2)
            beside.start()
        with network.inside(1):
            assert dial_near(r.find()) is None
            away.start()
        starting.join(60)
        r.coordinator.accept()
        r.coordinator.welcome()
        return [way(caplog), *(delegate.until("welcomed")[1] for delegate in (first, second))]


# --- what is wrong with the Unix socket, and TCP is used ------------------------------------------------------------


def test_without_a_unix_socket_all_use_tcp(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "listen_near", lambda _address, _backlog: None)
    replica().together()
    assert way(caplog) == "1 ranks are here, 0 of them over the Unix socket"


@pytest.mark.parametrize("how", ["silent", "busy", "liar", "closing"])
def test_something_else_at_the_name_does_not_keep_ranks_from_their_leader(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(follower_module, "HANDSHAKE_S", 0.3 if how == "silent" else 60.0)
    address = fixed()
    with squatter(address) as sock, socket.socket(socket.AF_UNIX) as other:
        if how == "busy":  # nobody takes the one connection that may wait
            other.connect(name_of(address))
        if how in ("liar", "closing"):
            threading.Thread(target=lie, args=(sock, how), daemon=True).start()
        replica(leader=address).together()
    assert way(caplog) == "1 ranks are here, 0 of them over the Unix socket"


def lie(listener: socket.socket, how: str) -> None:
    try:
        while True:
            sock, _ = listener.accept()
            with sock:
                if how == "liar":
                    sock.sendall(encode(TeamChallenge(job="demo", replica="r0", nonce=nonce())))
                    sock.recv(4096)
                    sock.sendall(encode(TeamWelcome(proof=b"x" * 32, host="127.0.0.1")))
    except OSError:
        return


@needs_root
@pytest.mark.root
def test_a_name_that_another_user_has_taken_is_told_and_not_trusted(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """It could pass on the proofs of the token, and then stand between a rank and its leader."""
    address = fixed()
    script = f"""
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind({name_of(address)!r})
sock.listen(8)
print("up", flush=True)
heard = sock.accept()[0].recv(4096)
print("heard", heard, flush=True)
"""
    other = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "/usr/bin/env", "python3", "-c", script]
    with subprocess.Popen(other, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            replica(leader=address).together()
            assert way(caplog) == "1 ranks are here, 0 of them over the Unix socket"
            assert any("another user listens at the name" in text for text in caplog.messages)
            assert process.stdout.readline() == b"heard b''\n", "not a byte was said to it"
        finally:
            process.kill()


@needs_root
@pytest.mark.root
def test_a_leader_takes_no_other_user_s_connection(replica: Callable[..., Replica]) -> None:
    r = replica()
    starting = r.start_leader()
    name = name_of(r.find())
    script = f"""
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect({name!r})
print(sock.recv(4096), flush=True)
"""
    other = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "/usr/bin/env", "python3", "-c", script]
    assert subprocess.run(other, stdout=subprocess.PIPE, check=True, timeout=60).stdout == b"b''\n"
    assert starting.is_alive()
    r.follower(1)[0].start()
    starting.join(60)
    assert r.failure is None


def test_a_user_who_is_unknown_here_is_nobody_s_friend(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here, there:
        assert trusted(here)
        monkeypatch.setattr(here.__class__, "getsockopt", lambda *_: (1).to_bytes(4, "little") + b"\xfe\xff\0\0" * 2)
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        assert not trusted(here)


def test_a_stranger_without_the_token_gets_nothing_and_holds_nobody_up(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "STRANGER_S", 0.3)
    r = replica()
    starting = r.start_leader()
    silent, rude, liar = (dial_near(r.find()) for _ in range(3))
    assert silent is not None
    assert rude is not None
    assert liar is not None
    for stranger in (silent, rude, liar):
        stranger.settimeout(60)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
    parser: FrameParser[FromLeader] = FrameParser(from_leader)
    (challenge,) = parser.feed(liar.recv(4096))
    assert isinstance(challenge, TeamChallenge)
    proof = prove(b"another token", "rank-hello", "demo", challenge.nonce)
    about = {"job": "demo", "replica": "r0", "world_size": 2, "info": info(1), "plan": "plan", "state": "state"}
    liar.sendall(encode(RankHello(**about, last_step=0, nonce=nonce(), proof=proof)))  # type: ignore[arg-type]
    for stranger, greeting in ((silent, 1), (rude, 1), (liar, 0)):
        with stranger:
            said = b""
            try:
                while data := stranger.recv(4096):
                    said += data
            except ConnectionResetError:
                pass  # with what it had said unread
            assert len(FrameParser(from_leader).feed(said)) == greeting
    assert starting.is_alive()
    r.follower(1)[0].start()
    starting.join(60)
    assert r.failure is None


# --- what is left ---------------------------------------------------------------------------------------------------


def test_a_killed_leader_leaves_nothing_in_the_way_of_the_next(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """Not even while a worker that it had forked lives on."""
    address = fixed()
    script = f"""
import os, threading, time
from ftar_core.runtime.assembly import Assembly
from ftar_core.runtime.rails import Rail
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts
from ftar_core.wire.address import Address
import selectors

at = Address({address.host!r}, {address.port})
settings = Settings(coordinator=at, job="demo", replica="r0", token=b"the token of the job",
                    rails=(Rail("lo", "", "127.0.0.1"),), node="n", rank=0, world_size=2, leader=at)

def published(_address):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)

Assembly(settings, RankFacts("plan", "state", 0), selectors.DefaultSelector(), print).gather(published)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            sock = dial_near(address)
            assert sock is not None
            with sock:
                sock.settimeout(60)
                assert len(FrameParser(from_leader).feed(sock.recv(4096))) == 1
                process.kill()
                assert sock.recv(4096) == b"", "the kernel tells at once"
            process.wait()
            os.kill(worker, 0)
            assert dial_near(address) is None
            replica(leader=address).together()
            assert way(caplog) == "1 ranks are here, 1 of them over the Unix socket"
        finally:
            process.kill()
            os.kill(worker, signal.SIGKILL)


def test_the_name_is_free_when_all_ranks_are_here(replica: Callable[..., Replica]) -> None:
    address = fixed()
    ((_, rank1),) = replica(leader=address).together()
    rank1.until("welcomed")
    assert dial_near(address) is None
    again = listen_near(address, 1)
    assert again is not None
    again.close()
