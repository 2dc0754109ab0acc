"""Many connections between two processes share their heartbeats, and each of them is looked after all the same."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from .. import HEARTBEAT_MS
from ..net import NAMESPACES, Net
from .rig import Rig

pytestmark = NAMESPACES
MANY = 64


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(nodes=2) as made:
        yield made


def datagrams(net: Net) -> int:
    """Sent by both nodes since their namespaces were made: nothing else in them speaks UDP."""
    total = 0
    for node in (0, 1):
        read = ["ip", "netns", "exec", net.ns(node), "cat", "/proc/net/snmp"]
        done = subprocess.run(read, capture_output=True, text=True, check=True)
        names, numbers = (line.split() for line in done.stdout.splitlines() if line.startswith("Udp:"))
        total += int(numbers[names.index("OutDatagrams")])
    return total


def rate(net: Net, seconds: float) -> float:
    before, begun = datagrams(net), time.monotonic()
    time.sleep(seconds)
    return (datagrams(net) - before) / (time.monotonic() - begun)


def said(rig: Rig, peer: int, words: str) -> int:
    return sum(words in line for line in rig.peers[peer].ask("log"))


def test_the_number_of_datagrams_does_not_grow_with_the_number_of_connections(net: Net) -> None:
    # Without a token each listener has a key of its own, so both directions have their pings: on each rail two keys,
    # two ends, a ping and its pong.
    bound = 2 * 2 * 2 * 2 * 1000 / HEARTBEAT_MS
    with Rig(net) as rig:
        for sender in (0, 1):
            rig.connect(sender, 1 - sender)
        time.sleep(0.5)  # whoever connects asks at once
        two = rate(net, 1)
        assert 0 < two < 1.3 * bound
        for k in range(2, MANY):
            rig.connect(k % 2, 1 - k % 2, k // 2 % 2, k // 2 % 2)
        time.sleep(0.5)
        assert rate(net, 1) < 1.3 * bound
        assert all(link["state"] == "UP" for peer in (0, 1) for link in rig.links(peer))


def test_all_connections_that_are_gone_at_the_receiver_only_are_found(net: Net) -> None:
    """As in test_faults, with so many that they do not all fit into one ping."""
    with Rig(net) as rig:
        comms = [rig.connect(0, 1) for _ in range(MANY)]
        time.sleep(0.3)  # TCP's delayed acknowledgements: whatever it sends again later would be answered by a reset
        for rail in (0, 1):
            net.lose_silently(1, rail, to=0)
        for rail in (0, 1):
            net.link(1, rail, "down")
        down = lambda peer: sum(link["state"] != "UP" for link in rig.links(peer))  # noqa: E731
        rig.until(lambda: down(1) == 2 * MANY, "the receiver dropped all connections")
        for rail in (0, 1):
            net.link(1, rail, "up")
        rig.until(lambda: said(rig, 0, "DOWN: the peer has closed this connection") > 0, "the sender is told")
        rig.until(lambda: down(0) == 0 and down(1) == 0, "all are connected again")
        for k in (0, 1, MANY // 2, MANY - 1):
            rig.stream(0, 1, comms[k], [70_000, 8], count=4)
        rig.finish(4)


def test_a_receiver_hears_that_its_sender_closed_while_no_rail_worked(net: Net) -> None:
    """The goodbye met no rail. The other connection brings the path back to life, and must not hide that this one is
    over: the peer is asked about it."""
    with Rig(net) as rig:
        first, other = rig.connect(0, 1), rig.connect(0, 1)
        for rail in (0, 1):
            net.link(0, rail, "down")
        rig.until(lambda: said(rig, 0, ": DOWN: ") == 4, "the sender dropped all connections")
        rig.peers[0].ask("close", kind="send", comm=first[0])
        for rail in (0, 1):
            net.link(0, rail, "up")
        rig.until(lambda: said(rig, 1, "the peer has closed this link") == 1, "the receiver is told")
        rig.stream(0, 1, other, [70_000, 8], count=4)
        rig.finish(4)
