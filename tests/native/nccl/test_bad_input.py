"""What can be wrong about a peer, a handle or a host has one stated outcome and one line that says so (ARCHITECTURE.md
has the table). Strangers, tokens and settings: test_strangers.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..net import NAMESPACES, Net, ip
from .abi import REMOTE, USAGE, Plugin, PluginError
from .rig import Peer, Rig
from .streams import MEGA

# ETHTOOL_GSET and ETHTOOL_SSET of linux/ethtool.h: the speed of a tap device is whatever somebody says.
SET_SPEED = """
import array, fcntl, socket, struct, sys
link = array.array("B", struct.pack("I40x", 1))
request = struct.pack("16sP16x", sys.argv[1].encode(), link.buffer_info()[0])
fcntl.ioctl(socket.socket(), 0x8946, request)
struct.pack_into("I8xH", link, 0, 2, int(sys.argv[2]))
struct.pack_into("H", link, 28, 0)
fcntl.ioctl(socket.socket(), 0x8946, request)
"""
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft: apt-get install nftables")


def namespaces(test: Any) -> Any:
    for mark in NAMESPACES:
        test = mark(test)
    return test


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(nodes=2) as made:
        yield made


def warnings(rig: Rig, peer: int, words: str) -> int:
    return sum(words in line and line.startswith("2 ") for line in rig.peers[peer].ask("log"))


def ended(rig: Rig, peer: int, words: str) -> None:
    """Its only stream ended with a remote error, and a warning says why: not by a bound that ran out."""
    assert rig.failed(peer) == [REMOTE]
    assert warnings(rig, peer, words), rig.logs()
    assert not warnings(rig, peer, "given up"), rig.logs()


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def send_one(peer: Peer, handle: str) -> int:
    comm: int = peer.ask("connect", device=0, handle=handle)
    peer.ask("send", comm=comm, stream=0, sizes=[1], count=1, window=1)
    return comm


def test_nobody_listens_for_the_handle_any_more() -> None:
    with Rig(n=2) as rig:
        listener, handle = rig.peers[1].ask("listen", device=0)
        rig.peers[1].ask("close", kind="listen", comm=listener)
        send_one(rig.peers[0], handle)
        ended(rig, 0, "refused: nobody listens for this handle any more")


def test_the_process_that_listened_is_gone() -> None:
    with Rig(n=2) as rig:
        handle = rig.peers[1].ask("listen", device=0)[1]
        rig.peers[1].kill()
        send_one(rig.peers[0], handle)
        ended(rig, 0, "nobody listens there any more")


def test_a_process_that_listens_on_the_dead_ones_port_is_not_the_one_that_was_meant() -> None:
    """The handle of an earlier life: its secret is not that of the process that has the port now."""
    with Rig(n=1, FTAR_NET_TIMEOUT_S="1") as rig, Peer() as other:
        old = bytearray.fromhex(other.ask("listen", device=0)[1])
        old[8:40] = os.urandom(32)
        send_one(rig.peers[0], old.hex())
        assert rig.failed(0) == [REMOTE]
        assert any("given up" in line for line in rig.peers[0].ask("log"))
        # Whoever was meant by nobody goes on.
        comm = other.ask("connect", device=0, handle=other.ask("listen", device=0)[1])
        other.ask("close", kind="send", comm=comm)


def test_a_handle_used_again_after_its_listener_closed(plugin: Plugin) -> None:
    """The copy of a handle makes a connection of its own while somebody listens, and none afterwards."""
    with Rig(n=1) as rig:
        listener, handle = plugin.listen(0)
        first = rig.peers[0].ask("connect", device=0, handle=handle.hex())
        receive = plugin.accept(listener)
        plugin.close_listen(listener)
        send_one(rig.peers[0], handle.hex())
        ended(rig, 0, "refused: nobody listens for this handle any more")
        rig.peers[0].ask("close", kind="send", comm=first)
        plugin.close_receive(receive)


def test_a_killed_process_whose_child_lives_on_is_found_out_by_its_connections() -> None:
    """A forked child inherits every descriptor; with the connections in it the peer would see nothing but silence."""
    with Rig(n=2) as rig:
        rig.stream(0, 1, rig.connect(0, 1), [1000])
        rig.advance(5)
        child = rig.peers[1].ask("fork")
        try:
            rig.advance(5)  # the child disturbs nobody
            rig.peers[1].kill()
            ended(rig, 0, "closed all its connections")
            assert sleeps(child)
        finally:
            os.kill(child, signal.SIGKILL)


@namespaces
@needs_nft
def test_large_packets_vanish_and_small_ones_pass(net: Net) -> None:
    """Heartbeats are small and find nothing; the bytes do. The rail is not used again until large packets pass."""
    with Rig(net) as rig:
        rig.stream(0, 1, rig.connect(0, 1), [MEGA])
        rig.advance(3)
        net.lose_large(0, 0)
        rig.until(
            lambda: warnings(rig, 0, "small packets pass: check the MTU (ping -M do -s 1472 10.77.0.2)"), "the warning"
        )
        rig.advance(10)
        line = "waiting for 5 echoes of 1472 bytes"
        rig.until(lambda: any(line in li["reason"] for li in rig.links(0)), "small packets prove nothing now")
        net.lose_large_no_more(0, 0)
        rig.until(lambda: any("returned to the preferred" in said for said in rig.peers[0].ask("log")), "back on rail0")
        rig.advance(10)


@namespaces
@needs_nft
def test_large_packets_vanish_on_the_only_rail() -> None:
    with Net(nodes=2, rails=1) as net, Rig(net, FTAR_NET_TIMEOUT_S="2.5") as rig:
        rig.stream(0, 1, rig.connect(0, 1), [MEGA])
        rig.advance(3)
        net.lose_large(0, 0)
        assert rig.failed(0) == [REMOTE]
        assert warnings(rig, 0, "no message has come through for")
        assert warnings(rig, 0, "check the MTU (ping -M do -s 1472 10.77.0.2)")


@namespaces
def test_the_two_ends_have_different_mtus(net: Net) -> None:
    ip("-n", net.ns(1), "link", "set", "rail0", "mtu", "1400")
    with Rig(net) as rig:
        for _ in range(2):
            rig.stream(0, 1, rig.connect(0, 1), [MEGA, 10])
        rig.advance(5)
        assert (
            warnings(rig, 0, "to 10.77.0.2 by rail0: the MTU is 1500 at rail0 and 1400 at or on the way to 10.77.0.2")
            == 1
        )
        assert not warnings(rig, 0, "by rail1")


@namespaces
def test_a_rail_without_an_address(net: Net) -> None:
    ip("-n", net.ns(0), "addr", "flush", "dev", "rail1")
    with pytest.raises(PluginError, match="the device rail1 has no address; run: ip addr add") as refused:
        Peer(ns=net.ns(0), FTAR_NET_RAILS="rail0,rail1")
    assert refused.value.code == USAGE


@namespaces
def test_one_rail_in_common_is_unprotected_and_said_so_once(net: Net) -> None:
    with Rig(net, n=0) as rig:
        rig.peers = [Peer(ns=net.ns(0)), Peer(ns=net.ns(1), FTAR_NET_RAILS="rail0")]
        for _ in range(3):
            rig.stream(0, 1, rig.connect(0, 1), [1000])
        rig.advance(5)
        assert warnings(rig, 0, "to 10.77.0.2 by rail0: unprotected") == 1
        assert warnings(rig, 1, "unprotected") == 1
        assert {li["reason"] for li in rig.links(0)} == {"connected; unprotected: the only rail"}


@namespaces
def test_link_local_addresses_only(net: Net) -> None:
    for node in (0, 1):
        for rail in (0, 1):
            ip("-n", net.ns(node), "addr", "flush", "dev", f"rail{rail}")
            ip("-n", net.ns(node), "addr", "add", f"fe80::{node + 1}:{rail}/64", "dev", f"rail{rail}", "nodad")
    with Rig(None, n=0) as rig:
        rig.peers = [Peer(ns=net.ns(i), FTAR_NET_RAILS="rail0,rail1") for i in (0, 1)]
        for there in (0, 1):
            for here in (0, 1):
                rig.stream(0, 1, rig.connect(0, 1, there, here), [MEGA, 10])
        rig.advance(5)
        net.link(0, 0, "down")
        rig.advance(5)


@namespaces
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs /dev/net/tun")
def test_a_backup_that_is_much_slower_is_named(net: Net) -> None:
    ns = net.ns(0)
    ip("-n", ns, "tuntap", "add", "slow0", "mode", "tap")
    ip("-n", ns, "link", "set", "slow0", "up")
    ip("-n", ns, "addr", "add", "10.88.0.1/24", "dev", "slow0")
    subprocess.run(["ip", "netns", "exec", ns, sys.executable, "-c", SET_SPEED, "slow0", "1000"], check=True)
    with Peer(ns=ns, FTAR_NET_RAILS="rail0,slow0") as peer:
        said = [line for line in peer.ask("log") if "unequal rails" in line]
        assert len(said) == 1
        assert "rail0 (10000 Mbit/s) is backed by slow0 (1000 Mbit/s)" in said[0]
