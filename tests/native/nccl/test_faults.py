"""Cables are pulled under NCCL's traffic: no byte is wrong, nothing fails while one path lives, and no call hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from ..net import NAMESPACES, Net, ip
from .abi import REMOTE, PluginError
from .rig import QUICK, Peer, Rig
from .streams import MEGA

pytestmark = NAMESPACES
MIXED = [0, 8, 4096, 70_000, MEGA]


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(nodes=2) as made:
        yield made


def all_pairs(rig: Rig, sizes: list[int], rails: int = 2) -> None:
    """Both ways, and every device with every device."""
    for there in range(rails):
        for here in range(rails):
            for sender, receiver in ((0, 1), (1, 0)):
                rig.stream(sender, receiver, rig.connect(sender, receiver, there, here), sizes)


def test_a_rail_of_one_node_goes_down_and_comes_back(net: Net) -> None:
    with Rig(net) as rig:
        all_pairs(rig, MIXED)
        rig.advance(10)
        for node, rail in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
            net.link(node, rail, "down")
            longest = rig.advance(10)
            assert longest < 10  # a bound for liveness; the benchmark has the number
            net.link(node, rail, "up")
            rig.advance(10)
        assert any("no carrier" in line for line in rig.peers[0].ask("log"))


def test_traffic_returns_to_the_preferred_rail_while_messages_are_in_flight(net: Net) -> None:
    """The receiver takes nothing, so the window stays full: a return that waited for an empty link would never come."""
    with Rig(net) as rig:
        comms = rig.connect(0, 1)
        stream = {"stream": 0, "sizes": [3 * MEGA, 500_000, 0, 70_000], "count": 40, "window": 16}
        rig.peers[0].ask("send", comm=comms[0], **stream)
        said = lambda words: any(words in line for line in rig.peers[0].ask("log"))  # noqa: E731
        net.link(0, 0, "down")
        rig.until(lambda: said("took over from rail0"), "the backup carries the data")
        net.link(0, 0, "up")
        rig.until(lambda: said("returned to the preferred rail"), "the return")
        assert rig.states()[0]["done"] == 0
        rig.peers[1].ask("receive", comm=comms[1], **stream)
        rig.finish(40)


def test_frames_vanish_on_a_rail_whose_carrier_is_up(net: Net) -> None:
    with Rig(net) as rig:
        all_pairs(rig, MIXED)
        rig.advance(5)
        for rail in (0, 1):
            net.lose_silently(0, rail, to=1)
            rig.advance(10)
            net.lose_no_more(0, rail, to=1)
            rig.advance(10)


def test_both_rails_are_down_for_a_while(net: Net) -> None:
    with Rig(net) as rig:
        all_pairs(rig, MIXED)
        rig.advance(5)
        for order in ((0, 1), (1, 0)):
            for rail in order:
                net.link(0, rail, "down")
            time.sleep(0.6)  # the outage itself
            for rail in order:
                net.link(0, rail, "up")
            rig.advance(10)


def test_a_connection_is_gone_at_the_receiver_only(net: Net) -> None:
    """The receiver's host loses both rails, so its resets reach nobody, and the sender has nothing to send: to it the
    peer looks stopped, its own connections look whole. It must be told, or nobody would ever connect again."""
    with Rig(net, FTAR_NET_TIMEOUT_S="3") as rig:
        comms = rig.connect(0, 1)
        rig.stream(0, 1, comms, MIXED, count=20)
        rig.finish(20)
        time.sleep(0.3)  # TCP's delayed acknowledgements: whatever it sends again later would be answered by a reset
        for rail in (0, 1):
            net.lose_silently(1, rail, to=0)
        for rail in (0, 1):
            net.link(1, rail, "down")
        # Or more: a rail may be found silent before, be tried again, and fall once more with its link.
        rig.until(lambda: said(rig, 1, ": DOWN: ") >= 2, "the receiver dropped both connections")
        for rail in (0, 1):
            net.link(1, rail, "up")  # which also forgets the false neighbours
        rig.until(lambda: said(rig, 0, "DOWN: the peer has closed this connection") > 0, "the sender is told")
        # Of the other one too, if it was not found silent before, nor the news that it carries the data met a reset.
        rig.until(lambda: said(rig, 0, ": DOWN: ") >= 2, "the sender knows of both")
        rig.until(lambda: all(said(rig, i, ": UP: ") > 2 for i in (0, 1)), "connected again")
        rig.stream(0, 1, comms, MIXED, count=20)
        rig.finish(20)


def said(rig: Rig, peer: int, words: str) -> int:
    return sum(words in line for line in rig.peers[peer].ask("log"))


def test_all_rails_gone_for_good_is_a_remote_error_at_both_ends(net: Net) -> None:
    with Rig(net, FTAR_NET_TIMEOUT_S="1.5") as rig:
        all_pairs(rig, MIXED)
        rig.advance(5)
        for rail in (0, 1):
            net.link(0, rail, "down")
        begun = time.monotonic()
        assert set(rig.failed(0) + rig.failed(1)) == {REMOTE}
        assert time.monotonic() - begun > 1
        assert any("given up" in line for line in rig.peers[0].ask("log"))


def test_three_rails_survive_the_loss_of_two() -> None:
    with Net(nodes=2, rails=3) as net, Rig(net) as rig:
        all_pairs(rig, MIXED, rails=3)
        rig.advance(5)
        for gone in ((0, 1), (1, 2), (2, 0)):
            for rail in gone:
                net.link(1, rail, "down")
            rig.advance(10)
            for rail in gone:
                net.link(1, rail, "up")
            rig.advance(5)


def test_the_peer_is_killed_while_a_rail_is_down(net: Net) -> None:
    with Rig(net, FTAR_NET_TIMEOUT_S="300") as rig:
        all_pairs(rig, MIXED)
        rig.advance(5)
        net.link(0, 0, "down")
        rig.advance(5)
        rig.peers[1].kill()
        begun = time.monotonic()
        assert set(rig.failed(0)) == {REMOTE}
        assert time.monotonic() - begun < 90  # far below the bound: it was found out, not waited for


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_connections_end_in_good_order_while_cables_are_pulled(net: Net, seed: int) -> None:
    """The last message is complete at both ends, whatever happens at that moment: a receiver may close when it
    has it, and its last acknowledgement may be lost with a rail."""
    dice = random.Random(seed)
    with Rig(net) as rig:
        for _ in range(6):
            comms = rig.connect(0, 1, dice.randrange(2), dice.randrange(2))
            begun = len(rig.peers[0].ask("state"))
            rig.stream(0, 1, comms, MIXED, count=20, window=4)
            node, rail = dice.randrange(2), dice.randrange(2)
            time.sleep(dice.choice([0, 0.002, 0.01]))
            net.link(node, rail, "down")
            rig.until(lambda b=begun: rig.peers[1].ask("state")[b]["done"] == 20, "all received")  # type: ignore[misc]
            rig.peers[1].ask("close", kind="receive", comm=comms[1])
            rig.until(lambda b=begun: rig.peers[0].ask("state")[b]["done"] == 20, "all sent")  # type: ignore[misc]
            rig.states()
            rig.peers[0].ask("close", kind="send", comm=comms[0])
            net.link(node, rail, "up")


def test_the_receiver_closes_and_its_last_acknowledgement_is_lost(net: Net) -> None:
    """Frames from the receiver vanish on the rail that carries the data. The message comes, its acknowledgement never
    leaves, and the receiver closes at once: its goodbye over the other rail has to say that all is complete."""
    with Rig(net) as rig:
        for _ in range(3):
            comms = rig.connect(0, 1)
            rig.stream(0, 1, comms, [1000], count=5)
            rig.until(lambda: all(s["done"] == 5 for s in rig.states()), "the connection is in use")
            net.lose_silently(1, 0, to=0)
            rig.stream(0, 1, comms, [1000], count=1)
            rig.until(lambda: rig.peers[1].ask("state")[-1]["done"] == 1, "received")
            rig.peers[1].ask("close", kind="receive", comm=comms[1])
            rig.until(lambda: rig.states()[len(rig.peers[0].ask("state")) - 1]["done"] == 1, "complete at the sender")
            rig.peers[0].ask("close", kind="send", comm=comms[0])
            net.lose_no_more(1, 0, to=0)
            for peer in rig.peers:
                peer.ask("forget")


@pytest.mark.parametrize(
    ("seed", "mode", "outages"),
    [
        (1, "backup", 6),
        (2, "stripe", 6),
        *(pytest.param(*more, 24, marks=pytest.mark.soak) for more in ((3, "backup"), (4, "stripe"))),
    ],
)
def test_anything_pulled_at_any_time_costs_no_byte(seed: int, mode: str, outages: int) -> None:
    dice = random.Random(seed)
    with Net(nodes=3) as net, Rig(net, n=3, FTAR_NET_OPTIONS=f"{QUICK},mode={mode}") as rig:
        for sender in range(3):
            for receiver in range(3):
                if sender != receiver:
                    comms = rig.connect(sender, receiver, dice.randrange(2), dice.randrange(2))
                    rig.stream(
                        sender,
                        receiver,
                        comms,
                        dice.choice([MIXED, [5], [MEGA, 300_000], [4 * MEGA]]),
                        window=dice.choice([1, 8, 32]),
                    )
        rig.advance(5)
        for _ in range(outages):
            node, rail, other = dice.randrange(3), dice.randrange(2), dice.choice([1, 2])
            silent = dice.random() < 0.3
            net.outage(dice, node, rail, (node + other) % 3 if silent else None)
        rig.advance(5)
        before = [p.ask("resources") for p in rig.peers]
        for _ in range(2):
            net.link(0, 0, "down")
            rig.advance(3)
            net.link(0, 0, "up")
            rig.advance(3)
        for peer, (descriptors, threads) in zip(rig.peers, before, strict=True):
            rig.until(lambda p=peer, d=descriptors: p.ask("resources")[0] <= d + 12, "descriptors given back")  # type: ignore[misc]
            assert peer.ask("resources")[1] == threads


@pytest.mark.parametrize("end", ["receiver", "sender"])
def test_a_rail_comes_back_with_another_address(net: Net, end: str) -> None:
    """The listener goes where its address went, and whoever dials is told so over the rail that lives."""
    node = 1 if end == "receiver" else 0
    with Rig(net) as rig:
        rig.stream(0, 1, rig.connect(0, 1), MIXED)
        rig.advance(10)
        net.link(node, 0, "down")
        rig.advance(10)
        new = net.renumber(node, 0, host=77)
        net.link(node, 0, "up")
        rig.until(lambda: said(rig, 1 - node, f"{new} by rail0: UP"), "the rail is up with its new address")
        rig.until(lambda: said(rig, 0, "returned to the preferred rail"), "traffic back on it")
        rig.advance(10)
        # And again for a new connection, whose handle or source has the new address from the start.
        rig.stream(0, 1, rig.connect(0, 1), MIXED)
        rig.advance(10)
        assert all(said(rig, i, "given up") == 0 for i in (0, 1))


def test_an_address_is_replaced_under_traffic(net: Net) -> None:
    """No carrier is lost and nothing is silent on the way out: the addresses themselves are looked at."""
    with Rig(net) as rig:
        rig.stream(0, 1, rig.connect(0, 1), MIXED)
        rig.advance(10)
        for node, host in ((1, 77), (0, 78), (1, 2)):
            before = said(rig, 0, "returned to the preferred rail")
            net.renumber(node, 0, host)
            rig.until(lambda b=before: said(rig, 0, "returned to the preferred rail") > b, "back on rail0")  # type: ignore[misc]
            rig.advance(10)
        assert said(rig, 1, "rail0 has the address 10.77.0.2 no more")
        assert said(rig, 0, "rail0 has the address 10.77.0.1 no more")


def test_the_only_rail_comes_back_with_another_address() -> None:
    """Nobody can say so to the sender: an error after the bound, with the address that was tried."""
    with Net(nodes=2, rails=1) as net, Rig(net, FTAR_NET_TIMEOUT_S="1.5") as rig:
        rig.stream(0, 1, rig.connect(0, 1), MIXED)
        rig.advance(10)
        net.link(1, 0, "down")
        net.renumber(1, 0, host=77)
        net.link(1, 0, "up")
        assert set(rig.failed(0) + rig.failed(1)) == {REMOTE}
        reason = next(line for line in rig.peers[0].ask("log") if "given up" in line)
        assert "to 10.77.0.2 by rail0: all rails have been dead" in reason


def test_with_nothing_configured_every_nic_but_the_management_one_is_a_rail(net: Net) -> None:
    ns = net.ns(0)
    ip("-n", ns, "link", "set", "lo", "up")
    for device, address in (("mgmt0", "10.99.0.1/24"), ("spare0", ""), ("br0", "10.98.0.1/24")):
        kind = ["bridge"] if device == "br0" else ["veth", "peer", "name", f"{device}-far"]
        ip("-n", ns, "link", "add", device, "type", *kind)
        ip("-n", ns, "link", "set", device, "up")
        if address:
            ip("-n", ns, "addr", "add", address, "dev", device)
    ip("-n", ns, "route", "add", "default", "via", "10.99.0.2", "dev", "mgmt0")
    with Peer(ns=ns) as peer:
        assert peer.ask("names") == ["rail0", "rail1"]
        assert any("0 rail0 (10.77.0.1) backed by rail1" in line for line in peer.ask("log"))


def test_ipv6_only(net: Net) -> None:
    for node in (0, 1):
        for rail in (0, 1):
            ns = net.ns(node)
            ip("-n", ns, "addr", "flush", "dev", f"rail{rail}")
            ip("-n", ns, "addr", "add", f"fd77:{rail}::{node + 1}/64", "dev", f"rail{rail}", "nodad")
    with Rig(None, n=0) as rig:
        rig.peers = [Peer(ns=net.ns(i)) for i in (0, 1)]
        all_pairs(rig, MIXED)
        rig.advance(10)
        net.link(0, 0, "down")
        rig.advance(10)


def test_a_namespace_with_a_management_nic_only_is_told_so(net: Net) -> None:
    ns = net.ns(0)
    for rail in (0, 1):
        ip("-n", ns, "link", "set", f"rail{rail}", "down")
    with pytest.raises(PluginError):
        Peer(ns=ns)
