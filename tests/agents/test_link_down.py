"""Link-down: what it refuses, and that everything the kernel forgot comes back, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_network import needs_root
from fake_links import FakeClock, FakeLinks, address, route

from agents.faults.contract import Target
from agents.faults.link_down import LinkDown
from agents.host.errors import HostError
from agents.host.links import find
from agents.host.machine import Machine

FAULT = LinkDown()
TARGET = Target("node1", "rail0")


def reason(machine: Machine, nic: str = "rail0") -> tuple[str, str]:
    refusal = FAULT.check(machine, Target("node1", nic), {})
    assert refusal is not None
    return refusal.code, refusal.reason


# --- refusals -----------------------------------------------------------------------------------------------------


def test_an_unknown_nic_is_answered_with_those_there_are(machine: Machine) -> None:
    code, text = reason(machine, "rail7")
    assert code == "unknown-nic"
    assert "rail7" in text
    assert "rail1" in text


def test_a_rail_that_is_down_by_itself_is_left_alone(machine: Machine, links: FakeLinks) -> None:
    links.change(2, up=False, carrier=False)
    assert reason(machine) == ("refused", "rail0 is down already, and not by a fault of ours")
    links.change(2, up=True)
    assert "no carrier" in reason(machine)[1]


def test_a_bond_member_is_refused_with_its_bond(machine: Machine, links: FakeLinks) -> None:
    bond = links.add("bond0")
    links.change(2, master_index=bond.index, slave_kind="bond")
    assert reason(machine) == ("refused", "rail0 is a member of bond bond0")


def test_a_nic_that_carries_others_is_refused(machine: Machine, links: FakeLinks, tmp_path: Path) -> None:
    links.add("vlan100", lower_index=2)
    assert reason(machine) == ("refused", "vlan100 is stacked on rail0 and would go down with it")
    del links.devices[5]
    device = tmp_path / "sys/class/net/rail0"
    (device / "device").mkdir(parents=True)
    (device / "ifindex").write_text("2\n")
    (device / "device/sriov_numvfs").write_text("4\n")
    assert reason(machine) == ("refused", "rail0 has 4 virtual functions, which would go down with it")


def test_a_route_that_could_not_be_put_back_is_a_reason_to_refuse(machine: Machine, links: FakeLinks) -> None:
    links.table.append(msgspec.structs.replace(route("10.9.0.0/16", 2), nexthop_object=True))
    code, text = reason(machine)
    assert code == "unsupported"
    assert "10.9.0.0/16" in text


def test_without_the_right_to_change_devices_it_is_unsupported(machine: Machine) -> None:
    import dataclasses

    assert "CAP_NET_ADMIN" in FAULT.unsupported(dataclasses.replace(machine, net_admin=False))


# --- what comes back ----------------------------------------------------------------------------------------------


def test_what_others_took_away_meanwhile_stays_away(machine: Machine, links: FakeLinks) -> None:
    links.addrs[2] = [address("10.0.0.1/24"), address("10.0.0.9/24"), address("fd00::1/64")]
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    undo = FAULT.settled(machine, undo)
    assert [a.text for a in undo.addresses] == ["fd00::1/64"]
    links.addrs[2].remove(address("10.0.0.9/24"))  # still there after the fault, so not the fault's doing
    FAULT.undo(machine, undo)
    assert [a.text for a in links.addrs[2]] == ["10.0.0.1/24", "fd00::1/64"]


def test_a_detour_that_a_routing_daemon_took_is_left_to_it(machine: Machine, links: FakeLinks) -> None:
    links.table = [route("10.9.0.0/16", 2)]
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    detour = route("10.9.0.0/16", 3)
    links.table.append(detour)
    FAULT.undo(machine, undo)
    assert links.table == [detour]


def test_what_has_expired_meanwhile_is_not_brought_back(machine: Machine, links: FakeLinks, clock: FakeClock) -> None:
    links.addrs[2] = [msgspec.structs.replace(address("fd00::1/64"), valid_s=30), address("fd00::2/64")]
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    clock.boot += 31
    FAULT.undo(machine, undo)
    assert [a.text for a in links.addrs[2]] == ["fd00::2/64"]


def test_one_thing_that_cannot_be_put_back_does_not_keep_the_others_away(machine: Machine, links: FakeLinks) -> None:
    links.addrs[2] = [address("fd00::1/64")]
    links.table = [route("10.9.0.0/16", 2)]
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    links.broken["add_address"] = errno.ENOMEM
    with pytest.raises(HostError):
        FAULT.undo(machine, undo)
    assert links.devices[2].up
    assert len(links.table) == 1
    del links.broken["add_address"]
    FAULT.undo(machine, undo)
    assert len(links.addrs[2]) == 1


def test_a_new_device_under_the_old_name_is_not_touched(machine: Machine, links: FakeLinks) -> None:
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    del links.devices[2]
    links.add("rail9")
    new = links.add("rail0", up=False)
    assert "does not exist any more" in FAULT.undo(machine, undo)
    assert not links.devices[new.index].up


def test_the_same_index_in_another_namespace_is_another_device(machine: Machine, links: FakeLinks) -> None:
    undo = msgspec.structs.replace(FAULT.plan(machine, TARGET, {}), netns=99, mac="02:ff:00:00:00:01")
    links.change(2, up=False)
    FAULT.undo(machine, undo)
    assert not links.devices[2].up


def test_the_commands_by_hand_bring_back_all_of_it(machine: Machine, links: FakeLinks) -> None:
    links.addrs[2] = [address("fd00::1/64")]
    links.table = [route("10.9.0.0/16", 2, gateway="10.0.0.2"), route("10.8.0.0/16", 2, table=99)]
    assert FAULT.by_hand(FAULT.plan(machine, TARGET, {})) == [
        "ip link set rail0 up",
        "ip -6 address replace fd00::1/64 dev rail0",
        "ip route add 10.8.0.0/16 table 99 dev rail0",
        "ip route add 10.9.0.0/16 via 10.0.0.2 dev rail0",
    ]


# --- the real kernel ----------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[Machine, Any, int]]:
    """(machine, netlink, index of rail0) in a namespace of its own."""
    from agent_network import Namespace, add_rail, add_routes
    from pyroute2 import IPRoute

    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            index = add_rail(ipr, "rail0", 0)
            add_routes(ipr, index, 0)
            yield Machine(scratch=tmp_path / "scratch"), ipr, index
    finally:
        namespace.close()


@pytest.mark.root
@needs_root
def test_addresses_ipv6_routes_and_neighbours_are_exactly_as_before(real: tuple[Machine, Any, int]) -> None:
    from agent_network import picture, settled

    machine, ipr, index = real
    before = settled(ipr, index)
    assert len([line for line in before if line.startswith("address")]) == 4
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    gone = picture(ipr, index)
    assert "up False" in gone
    assert not [line for line in gone if "fd77" in line or "10.88" in line], "the kernel forgot nothing: no test"
    undo = FAULT.settled(machine, undo)
    FAULT.undo(machine, undo)
    assert settled(ipr, index) == before


@pytest.mark.root
@needs_root
def test_ipv6_addresses_can_be_used_at_once(real: tuple[Machine, Any, int]) -> None:
    """No second or two of duplicate address detection, and no "nodad" mark left behind where there was none."""
    machine, ipr, index = real
    ipr.addr("add", index=index, address="fd99::5", prefixlen=64)
    from agent_network import settled

    before = settled(ipr, index)
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    FAULT.undo(machine, undo)
    flags = {m.get("address"): m.get("flags") for m in ipr.get_addr(index=index, family=10)}
    assert not flags["fd99::5"] & 0x40
    assert settled(ipr, index) == before


@pytest.mark.root
@needs_root
def test_a_multipath_route_comes_back_with_its_weights(real: tuple[Machine, Any, int]) -> None:
    from agent_network import picture

    machine, ipr, index = real
    hops = [{"gateway": "10.77.0.5", "oif": index, "hops": 3}, {"gateway": "10.77.0.6", "oif": index, "hops": 1}]
    ipr.route("add", dst="10.91.0.0/16", multipath=hops)

    def multipath() -> list[str]:
        return [str(m.get("multipath")) for m in ipr.get_routes(family=2) if m.get("dst") == "10.91.0.0"]

    before = multipath()
    assert len(before) == 1
    undo = FAULT.plan(machine, TARGET, {})
    hops_by_hand = "nexthop via 10.77.0.5 dev rail0 weight 4 nexthop via 10.77.0.6 dev rail0 weight 2"
    assert f"ip route add 10.91.0.0/16 {hops_by_hand}" in " ".join(FAULT.by_hand(undo))
    assert any(c.startswith("ip route add 10.88.0.0/16") and c.endswith("mtu 1300") for c in FAULT.by_hand(undo))
    FAULT.inject(machine, undo)
    assert multipath() == []
    FAULT.undo(machine, undo)
    assert multipath() == before
    assert "up True" in picture(ipr, index)


@pytest.mark.root
@needs_root
def test_a_renamed_rail_is_brought_back_under_its_new_name(real: tuple[Machine, Any, int]) -> None:
    machine, ipr, index = real
    undo = FAULT.plan(machine, TARGET, {})
    FAULT.inject(machine, undo)
    ipr.link("set", index=index, ifname="renamed0")
    assert FAULT.undo(machine, undo).startswith("renamed0 is up again")
    nic = find(machine.links.nics(), "renamed0")
    assert nic is not None
    assert nic.up


@pytest.mark.root
@needs_root
def test_a_stacked_device_and_a_vanished_one_are_seen(real: tuple[Machine, Any, int]) -> None:
    machine, ipr, index = real
    assert FAULT.check(machine, TARGET, {}) is None
    undo = FAULT.plan(machine, TARGET, {})
    ipr.link("del", index=index)
    with pytest.raises(HostError, match="vanished"):
        FAULT.inject(machine, undo)
    assert FAULT.probe(machine, undo).in_force is False
    assert "does not exist" in FAULT.undo(machine, undo)


@pytest.mark.root
@needs_root
def test_the_kernels_no_comes_with_its_words(real: tuple[Machine, Any, int]) -> None:
    machine, ipr, index = real
    nic = find(machine.links.nics(), "rail0")
    assert nic is not None
    ipr.link("del", index=index)
    with pytest.raises(HostError) as caught:
        machine.links.set_up(nic, up=True)
    assert caught.value.name == "ENODEV"
    assert str(caught.value) == "set rail0 up: No such device"
