"""The door to the host: bytes of netlink, and facts of this machine."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.host import proc
from agents.host.clock import SystemClock
from agents.host.errors import HostError
from agents.host.links import LinkMode, NetlinkLinks, find
from agents.host.netns import may_change_network, namespace_inode
from agents.host.netobjects import RTNEXTHOP, parse_address, parse_neighbour, parse_route
from agents.host.nft import NftProgram
from agents.host.rtnl import RTMSG, attr_map, attrs, pack_attr
from agents.host.sysfs import Sysfs


def test_the_loopback_device_is_what_everybody_knows() -> None:
    links = NetlinkLinks()
    lo = find(links.nics(), "lo")
    assert lo is not None
    assert (lo.index, lo.mac, lo.lower_index) == (1, "00:00:00:00:00:00", 0)
    if lo.up:
        assert "127.0.0.1/8" in [a.text for a in links.addresses(1)]
    assert links.link_mode("lo") == LinkMode()
    assert links.link_mode("no-such-device-at-all") == LinkMode()


def test_what_netlink_says_agrees_with_sysfs() -> None:
    sysfs = Sysfs()
    for nic in NetlinkLinks().nics():
        if sysfs.shows(nic.name, nic.index):
            assert sysfs.text(f"class/net/{nic.name}/address") == nic.mac
            assert sysfs.number(f"class/net/{nic.name}/mtu") == nic.mtu


def test_a_change_without_the_right_to_it_is_said_with_its_errno() -> None:
    code = (
        "from agents.host.links import *\n"
        "links = NetlinkLinks()\n"
        "try: links.set_up(find(links.nics(), 'lo'), up=False)\n"
        "except HostError as error: print(error.name, error)\n"
    )
    prefix = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"] if os.geteuid() == 0 else []
    try:
        result = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no setpriv here")
    if result.returncode != 0:
        pytest.skip(f"setpriv does not work here: {result.stderr}")
    assert result.stdout.startswith("EPERM set lo down: Operation not permitted")


def test_the_clock_counts_on_and_the_boot_has_a_name() -> None:
    clock = SystemClock()
    assert clock.boot_s() <= clock.boot_s()
    assert clock.boot_id() == SystemClock().boot_id() != ""
    assert namespace_inode() > 0
    assert may_change_network() in (True, False)


def test_a_process_that_is_there_and_one_that_is_not() -> None:
    reader = proc.ProcessReader()
    reading = reader.read(os.getpid())
    assert reading is not None
    assert reading.rss_mb > 1
    assert reader.read(2**22 + 7) is None


def test_sysfs_below_another_root(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(" 0x10\n")
    (tmp_path / "b").write_text("many\n")
    sysfs = Sysfs(tmp_path)
    assert (sysfs.number("a"), sysfs.number("b"), sysfs.number("c")) == (16, None, None)


@given(st.lists(st.tuples(st.integers(1, 200), st.binary(max_size=40)), max_size=8))
def test_attributes_read_back_as_they_were_packed(given: list[tuple[int, bytes]]) -> None:
    packed = b"".join(pack_attr(kind, value) for kind, value in given)
    assert [(a.type, a.value) for a in attrs(packed)] == given
    assert len(packed) % 4 == 0


@given(st.binary(max_size=300))
def test_any_bytes_end_the_reading_of_attributes(data: bytes) -> None:
    for attribute in attrs(data):
        assert len(attribute.value) <= len(data)


@given(st.binary(min_size=12, max_size=200))
def test_any_message_is_parsed_or_left_out(data: bytes) -> None:
    for parse in (parse_address, parse_route, parse_neighbour):
        parse(data)


def test_a_route_is_put_back_without_what_only_the_kernel_may_say() -> None:
    """ "dead" and "link down" marks of next hops, and cache information, would be refused."""
    hop = RTNEXTHOP.pack(RTNEXTHOP.size, 0x01 | 0x10, 2, 7)
    body = RTMSG.pack(2, 16, 0, 0, 254, 3, 0, 1, 0x10)
    body += pack_attr(1, bytes([10, 9, 0, 0])) + pack_attr(9, hop) + pack_attr(12, bytes(32))
    route = parse_route(body)
    assert route is not None
    assert (route.text, route.devices) == ("10.9.0.0/16", (7,))
    again = route.restorable(0)
    assert again is not None
    found = attr_map(again, RTMSG.size)
    assert set(found) == {1, 9}
    assert RTNEXTHOP.unpack(found[9]) == (RTNEXTHOP.size, 0, 2, 7)
    assert RTMSG.unpack_from(again)[8] == 0


def test_a_route_with_an_end_is_put_back_with_what_is_left_of_it() -> None:
    cache = struct.pack("=IIiIIIII", 0, 0, 60 * 100, 0, 0, 0, 0, 0)
    body = RTMSG.pack(10, 64, 0, 0, 254, 3, 0, 1, 0) + pack_attr(1, bytes(16)) + pack_attr(12, cache)
    route = parse_route(body)
    assert route is not None
    assert route.expires_s == 60
    again = route.restorable(20)
    assert again is not None
    assert struct.unpack("=I", attr_map(again, RTMSG.size)[23]) == (40,)
    assert route.restorable(61) is None


def test_an_error_names_operation_number_and_words() -> None:
    error = HostError.of("set rail0 up", OSError(16, "Device or resource busy"))
    assert (error.operation, error.errno, error.name) == ("set rail0 up", 16, "EBUSY")
    assert str(error) == "set rail0 up: Device or resource busy"


def test_a_program_that_is_removed_meanwhile_is_missed_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    nft = NftProgram()
    nft._works = True
    if shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin") is not None:
        assert nft.unsupported() == "", "what worked once is not tried again"
    monkeypatch.setattr("agents.host.nft.shutil.which", lambda *_a, **_k: None)
    assert "the program nft is missing: install the package nftables" in nft.unsupported()
