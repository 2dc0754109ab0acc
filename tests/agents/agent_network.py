"""A network namespace of a test's own: made by leaving ours for a moment, gone when nobody is in it any more."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyroute2 import IPRoute

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS = 0x8913
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Namespace:
    """`with namespace.entered():` the calling thread, and what it starts, is inside."""

    def __init__(self) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.unshare(CLONE_NEWNET))
            self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            _check(_libc.setns(home, CLONE_NEWNET))
        finally:
            os.close(home)

    @contextmanager
    def entered(self) -> Iterator[None]:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(self._fd, CLONE_NEWNET))
            yield
        finally:
            _check(_libc.setns(home, CLONE_NEWNET))
            os.close(home)

    def close(self) -> None:
        os.close(self._fd)


def add_rail(ipr: IPRoute, name: str, number: int) -> int:
    """A veth with its peer, both up, with two IPv4 addresses of one network and one of IPv6. Returns its index."""
    ipr.link("add", ifname=name, kind="veth", peer={"ifname": f"{name}p"})
    index = int(ipr.link_lookup(ifname=name)[0])
    for device in (index, ipr.link_lookup(ifname=f"{name}p")[0]):
        ipr.link("set", index=device, state="up")
    ipr.addr("add", index=index, address=f"10.77.{number}.1", prefixlen=24)
    ipr.addr("add", index=index, address=f"10.77.{number}.9", prefixlen=24)
    ipr.addr("add", index=index, address=f"fd77:{number}::1", prefixlen=64, flags=0x02)  # IFA_F_NODAD
    return index


def add_routes(ipr: IPRoute, index: int, number: int) -> None:
    """Routes of several kinds: with gateway and metrics, IPv6, another table, two of one destination, a local one."""
    ipr.route("add", dst="10.88.0.0/16", gateway=f"10.77.{number}.2", oif=index, priority=7, metrics={"mtu": 1300})
    ipr.route("add", dst="10.89.0.0/16", oif=index, table=99, scope=253)
    ipr.route("append", dst="10.89.0.0/16", gateway=f"10.77.{number}.3", oif=index, table=99)
    ipr.route("add", dst="10.90.0.0/16", gateway=f"10.77.{number}.4", oif=index, prefsrc=f"10.77.{number}.9")
    ipr.route("add", dst="fd88::/64", gateway=f"fd77:{number}::2", oif=index, family=10, priority=5)
    ipr.neigh("add", dst=f"10.77.{number}.2", lladdr="02:aa:00:00:00:02", ifindex=index, state=0x80)
    ipr.neigh("add", dst=f"fd77:{number}::2", lladdr="02:aa:00:00:00:02", ifindex=index, state=0x80)


def picture(ipr: IPRoute, index: int) -> set[str]:
    """Everything of the device that a fault must bring back, in a form that can be compared."""
    return pictures(ipr, {index})[index]


def pictures(ipr: IPRoute, indexes: Collection[int]) -> dict[int, set[str]]:
    """The same of several devices, with one dump of each kind for all of them."""
    found: dict[int, set[str]] = {index: {f"up {_is_up(index)}"} for index in indexes}
    for message in ipr.get_addr():
        if message["index"] in found:
            flags = (message.get("flags") or 0) & ~0x40  # tentative: still being checked for duplicates
            parts = [message.get(k) for k in ("address", "local", "broadcast", "label")]
            text = f"address {parts}/{message['prefixlen']} scope {message['scope']} flags {flags}"
            found[message["index"]].add(text)
    for message in ipr.get_routes():
        if message.get("oif") in found:
            found[message.get("oif")].add(f"route {_plain(message)}")
    for message in ipr.get_neighbours():
        if message["state"] == 0x80 and message["ifindex"] in found:
            found[message["ifindex"]].add(f"neighbour {message.get('dst')} {message.get('lladdr')}")
    return found


def _is_up(index: int) -> bool:
    """By ioctl (netdevice(7)): a netlink message has hundreds of fields, which take a millisecond to read."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        wish = struct.pack("16sh22x", socket.if_indextoname(index).encode(), 0)
        flags: int = struct.unpack("16sh22x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, wish))[1]
        return bool(flags & 1)


def _plain(message: Any) -> str:
    skipped = {"cacheinfo", "CACHEINFO"}
    attributes = sorted(
        f"{name.removeprefix('RTA_')}={_value(value)}"
        for name, value in message["attrs"]
        if name.removeprefix("RTA_") not in skipped
    )
    head = [f"{key}={message[key]}" for key in ("family", "dst_len", "tos", "proto", "scope", "type", "flags")]
    return " ".join([*head, *attributes])


def _value(value: Any) -> str:
    return str(sorted(value["attrs"])) if isinstance(value, dict) and "attrs" in value else str(value)


def settled(ipr: IPRoute, index: int, timeout_s: float = 60.0) -> set[str]:
    """The picture once no address is being checked for duplicates any more, and each has its local route: the kernel
    adds that one a moment later."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        addresses = ipr.get_addr(index=index, family=10)
        local = {m.get("dst") for m in ipr.get_routes(family=10, table=255) if m.get("oif") == index}
        tentative = any((message.get("flags") or 0) & 0x40 for message in addresses)
        if not tentative and all(message.get("address") in local for message in addresses):
            break
        time.sleep(0.05)
    return picture(ipr, index)
