"""The status socket: what operators see of a process's links, and that nobody who asks gets in the way of the data."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftar_core.errors import WireError
from ftar_core.wire.linkstatus import Link, LinkStatus, parse, pid_in

from .cluster import Cluster
from .nccl.abi import Plugin, pair
from .nccl.rig import LOOPBACK, Rig
from .net import NAMESPACES, Net


def connect(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect("\0" + name[1:])
    return sock


def read(name: str) -> bytes:
    with connect(name) as sock:
        data = b""
        while chunk := sock.recv(1 << 18):
            data += chunk
        return data


def names_of(pid: int, table: str = "/proc/net/unix") -> list[str]:
    found = {line.split()[-1] for line in Path(table).read_text().splitlines()}
    return sorted(name for name in found if pid_in(name) == pid)


def status(pid: int, table: str = "/proc/net/unix") -> LinkStatus:
    (name,) = names_of(pid, table)
    return parse(read(name))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    from ftar_core.ncclenv import plugin_path

    monkeypatch.setenv("FTAR_NET_RAILS", LOOPBACK)
    monkeypatch.setenv("FTAR_JOB", 'a "job"')
    monkeypatch.setenv("RANK", "3")
    made = Plugin(plugin_path(), 12)
    yield made
    made.close()


def test_a_process_that_runs_only_the_plugin_is_seen(plugin: Plugin) -> None:
    send, receive = pair(plugin, here=1, there=1)
    seen = status(os.getpid())
    assert (seen.kind, seen.job, seen.rank, seen.mode) == ("nccl", 'a "job"', "3", "backup")
    assert [port.name for port in seen.rails] == ["rail0", "rail1"]
    assert seen.links_total == 2
    assert {link.direction for link in seen.links} == {"out", "in"}
    for link in seen.links:
        assert link.peer == seen.name  # to itself
        assert {seen.rails[rail.rail].name for rail in link.rails} == {"rail0", "rail1"}
        assert [rail.state for rail in link.rails] == ["UP", "UP"]
        assert link.rails[0].rail == 1  # the device that was asked for comes first
    (out,) = [link for link in seen.links if link.direction == "out"]
    assert [rail.active for rail in out.rails] == [True, False]
    assert {rail.address for rail in out.rails} == {"127.0.0.1", "127.0.0.2"}
    plugin.close_send(send)
    plugin.close_receive(receive)
    assert status(os.getpid()).links == ()


def test_a_link_that_stripes_says_that_all_rails_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftar_core.ncclenv import plugin_path

    monkeypatch.setenv("FTAR_NET_RAILS", LOOPBACK)
    monkeypatch.setenv("FTAR_NET_OPTIONS", "mode=stripe,heartbeat_misses=100")
    plugin = Plugin(plugin_path(), 12)
    send, receive = pair(plugin)
    until = time.monotonic() + 90
    seen = status(os.getpid())
    while [r.active for link in seen.links if link.direction == "out" for r in link.rails] != [True, True]:
        assert time.monotonic() < until, seen
        time.sleep(0.02)
        seen = status(os.getpid())
    assert seen.mode == "stripe"
    plugin.close_send(send)
    plugin.close_receive(receive)
    plugin.close()


def test_a_ring_is_seen_too_and_its_socket_ends_with_it() -> None:
    with Cluster(2) as cluster:
        cluster.start()
        seen = [parse(read(name)) for name in names_of(os.getpid())]
        assert sorted(one.name for one in seen) == ["r0", "r1"]
        assert {one.kind for one in seen} == {"ring"}
        assert sorted((one.name, link.direction, link.peer) for one in seen for link in one.links) == [
            ("r0", "in", "r1"),
            ("r0", "out", "r1"),
            ("r1", "in", "r0"),
            ("r1", "out", "r0"),
        ]
    assert names_of(os.getpid()) == []


def test_readers_who_do_not_read_are_dropped_and_writers_not_heard(plugin: Plugin) -> None:
    pairs = [pair(plugin) for _ in range(150)]
    (name,) = names_of(os.getpid())
    lazy = [connect(name) for _ in range(12)]
    for sock in lazy:
        try:
            sock.send(b"GET / HTTP/1.1\r\n\r\n" * 100)
        except BrokenPipeError:
            pass  # there were too many already
    begun = time.monotonic()
    seen: list[LinkStatus] = []
    while not seen:
        try:
            seen.append(parse(read(name)))
        except (WireError, ConnectionError):  # its places are taken, for a second
            assert time.monotonic() - begun < 90
            time.sleep(0.05)
    assert seen[0].links_total == 300
    assert len(seen[0].links) == 300
    for sock in lazy:
        sock.close()
    for send, receive in pairs:
        plugin.close_send(send)
        plugin.close_receive(receive)


class TestInNamespaces:
    pytestmark = NAMESPACES

    def test_a_lost_rail_is_one_change_of_many_links_with_its_reason(self) -> None:
        with Net(nodes=2) as net, Rig(net, FTAR_NET_OPTIONS="hold_down_ms=300,heartbeat_misses=20") as rig:
            for _ in range(16):
                rig.stream(0, 1, rig.connect(0, 1), [4096])
            rig.advance(5)
            pid = rig.peers[0].process.pid
            table = f"/proc/{pid}/net/unix"
            name = names_of(pid, table)[0]

            def look() -> LinkStatus:
                # Abstract sockets are a namespace's own: read by a process in there.
                code = (
                    "import socket, sys\n"
                    "s = socket.socket(socket.AF_UNIX)\n"
                    f"s.connect('\\0' + {name[1:]!r})\n"
                    "while data := s.recv(1 << 18):\n"
                    "    sys.stdout.buffer.write(data)\n"
                )
                argv = ["ip", "netns", "exec", net.ns(0), sys.executable, "-S", "-c", code]
                return parse(subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout)

            before = look()
            assert before.changes == ()
            net.link(0, 0, "down")
            rig.advance(5)
            net.link(0, 0, "up")
            until = time.monotonic() + 90
            after = look()
            while [c.to for c in after.changes if c.kind == "rail"] != ["DOWN", "HOLD", "UP"]:
                assert time.monotonic() < until, after.changes
                time.sleep(0.1)
                after = look()
            down = after.changes[0]
            assert (down.rail, down.links, down.from_, down.direction) == ("rail0", 16, "UP", "out")
            assert "down" in down.reason or "carrier" in down.reason
            assert down.detect_ms >= 0
            assert [c.seq for c in after.changes] == list(range(1, len(after.changes) + 1))
            moved = [c for c in after.changes if c.kind == "moved"]
            assert moved[0].rail == "rail1"
            assert sum(c.links for c in moved if c.rail == "rail1") == 16
            assert all(link.resumes == 1 for link in after.links)
            assert all(link.rails[0].flaps == 1 for link in after.links)
            self.goes_silent(net, rig, look)
            rig.peers[1].signal(signal.SIGKILL)
            until = time.monotonic() + 90
            while not [c for c in look().changes if c.kind == "over"]:
                assert time.monotonic() < until
                time.sleep(0.1)

    def goes_silent(self, net: Net, rig: Rig, look: Callable[[], LinkStatus]) -> None:
        """An idle connection from a peer that loses all rails: its state is UP, since nobody can say which of the two
        has failed, but what people read is that nothing is heard, long before it is given up."""
        rig.connect(1, 0)
        for rail in (0, 1):
            net.link(1, rail, "down")
        until = time.monotonic() + 90

        def idle() -> Link:
            return next(link for link in look().links if link.direction == "in")

        # The first of them is DOWN instead if the second one lived on for long enough to convict it.
        while "UP" in (states := [rail.state for rail in idle().rails]) or "SILENT" not in states:
            assert time.monotonic() < until, idle()
            time.sleep(0.1)
        (silent, *_) = [rail for rail in idle().rails if rail.state == "SILENT"]
        assert "nothing is heard on any rail" in silent.reason
        assert silent.since_s >= 1
        while not (dead := [c for c in look().changes if c.kind == "dead"]):
            assert time.monotonic() < until, look().changes
            time.sleep(0.1)
        # On a busy machine TCP may be the first to know.
        assert any(words in dead[0].reason for words in ("silent for", "no acknowledgement", "no answer")), dead[0]
        for rail in (0, 1):
            net.link(1, rail, "up")
        while not [c for c in look().changes if c.kind == "back"] or "SILENT" in {rail.state for rail in idle().rails}:
            assert time.monotonic() < until, look()
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", "not a link status"),
        (b'{"x":' * 100_000, "nested too deep"),
        (b'{"schema":3,"more":1}', "schema 3"),
        (b'{"schema":2}', "missing required field"),
        (b"x" * (4 * 2**20 + 1), "more than 4194304 bytes"),
    ],
)
def test_what_is_no_document_is_refused_in_a_sentence(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        parse(data)


def test_unknown_keys_and_states_are_refused(plugin: Plugin) -> None:
    send, receive = pair(plugin)
    data = read(names_of(os.getpid())[0])
    parse(data)
    for old, new, words in (
        (b'"job":', b'"jobs":', "unknown field"),
        (b'"UP"', b'"SIDEWAYS"', "a state that there is not"),
        (b'"kind":"nccl"', b'"kind":"made-up"', "kind 'made-up'"),
        (b'"rail":1', b'"rail":7', "a rail that is not in its list"),
    ):
        assert old in data
        with pytest.raises(WireError, match=words):
            parse(data.replace(old, new))
    plugin.close_send(send)
    plugin.close_receive(receive)
