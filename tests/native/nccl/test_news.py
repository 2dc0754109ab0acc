"""The kernel's news about devices and addresses may be missing or get lost: what is true is read all the same."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..net import NAMESPACES, Net
from .no_news import SYS_SOCKET
from .rig import Peer, Rig

pytestmark = NAMESPACES
MIXED = [0, 8, 4096, 70_000]
NO_NEWS = Path(__file__).with_name("no_news.py")


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(nodes=2) as made:
        yield made


def said(rig: Rig, peer: int, words: str) -> int:
    return sum(words in line for line in rig.peers[peer].ask("log"))


def news_sockets(peer: Peer) -> list[list[str]]:
    """This process's sockets that are subscribed to news, as its namespace lists them (netlink(7))."""
    pid = peer.process.pid
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(os.readlink(fd))
        except OSError:
            continue
    rows = [line.split() for line in Path(f"/proc/{pid}/net/netlink").read_text().splitlines()[1:]]
    return [row for row in rows if row[1] == "0" and int(row[3], 16) != 0 and f"socket:[{row[9]}]" in mine]


def survives_a_pulled_cable_and_a_new_address(net: Net, rig: Rig) -> None:
    rig.stream(0, 1, rig.connect(0, 1), MIXED)
    rig.advance(5)
    net.link(0, 0, "down")
    rig.until(lambda: said(rig, 0, "rail0: DOWN: rail0 has no carrier") > 0, "the carrier is polled")
    rig.advance(5)
    net.link(0, 0, "up")
    rig.until(lambda: said(rig, 0, "returned to the preferred rail") > 0, "back on rail0")
    new = net.renumber(1, 0, host=77)
    rig.until(lambda: said(rig, 0, f"{new} by rail0: UP") > 0, "the receiver's new address is found and told")
    rig.advance(5)


@pytest.mark.skipif(platform.machine() not in SYS_SOCKET, reason="no_news.py does not know this machine's system calls")
def test_without_netlink_polling_alone_finds_everything(net: Net) -> None:
    with Rig(net, wrap=[sys.executable, str(NO_NEWS)]) as rig:
        assert [news_sockets(peer) for peer in rig.peers] == [[], []]
        survives_a_pulled_cable_and_a_new_address(net, rig)


def test_news_that_was_lost_is_a_reason_to_look(net: Net) -> None:
    """The receiver stands still while more news comes than its socket holds. The address that changes at the end is not
    among what it reads, only that something was lost."""
    with Rig(net) as rig:
        rig.stream(0, 1, rig.connect(0, 1), MIXED)
        rig.advance(5)
        ns, peer = net.ns(1), rig.peers[1]
        (before,) = news_sockets(peer)
        peer.signal(signal.SIGSTOP)
        try:
            noise = "".join(
                f"addr {do} 10.99.{k}.1/32 dev lo\n" for k in range(250) for do in ("add", "del", "add", "del")
            )
            subprocess.run(["ip", "-n", ns, "-batch", "-"], input=noise, text=True, check=True)
            (full,) = news_sockets(peer)
            assert int(full[8]) > int(before[8]), "the kernel dropped news"
            new = net.renumber(1, 0, host=77)
            (after,) = news_sockets(peer)
            assert int(after[8]) > int(full[8]), "that of the new address too"
        finally:
            peer.signal(signal.SIGCONT)
        rig.until(lambda: said(rig, 0, f"{new} by rail0: UP") > 0, "the new address is found and told")
        rig.advance(5)
