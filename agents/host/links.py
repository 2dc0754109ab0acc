"""Network devices of this network namespace: what they are, and the few changes that faults make to them.

`Links` is what the rest of the agent sees; `NetlinkLinks` is the real one. Everything comes from netlink, not from
/sys/class/net, because sysfs shows the namespace it was mounted in, which need not be ours.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from typing import Protocol

import msgspec

from agents.host.errors import HostError
from agents.host.netobjects import (
    Address,
    Neighbour,
    Route,
    parse_address,
    parse_neighbour,
    parse_route,
)
from agents.host.rtnl import (
    IFADDR,
    IFINFO,
    NDMSG,
    NLM_F_APPEND,
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_GETNEIGH,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWNEIGH,
    RTM_NEWROUTE,
    RTMSG,
    Rtnl,
    attr_map,
    u32,
)

IFF_UP = 0x1
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_MASTER, IFLA_LINKINFO = 1, 3, 4, 5, 10, 18
IFLA_STATS64, IFLA_CARRIER, IFLA_CARRIER_CHANGES, IFLA_LINK_NETNSID = 23, 33, 35, 37
IFLA_INFO_KIND, IFLA_INFO_SLAVE_KIND = 1, 4
STATS64 = struct.Struct("=8Q")  # rx and tx: packets, bytes, errors, dropped
SIOCETHTOOL, ETHTOOL_GSET = 0x8946, 0x1
IFNAMSIZ = 16
NLM_F_REPLACE = 0x100


class Counters(msgspec.Struct, frozen=True):
    rx_bytes: int = 0
    tx_bytes: int = 0
    rx_errors: int = 0
    tx_errors: int = 0
    rx_dropped: int = 0
    tx_dropped: int = 0
    carrier_changes: int = 0


class Nic(msgspec.Struct, frozen=True):
    """One device. `up` is the administrator's wish (IFF_UP), `carrier` what the cable says."""

    name: str
    index: int
    mac: str
    mtu: int
    up: bool
    carrier: bool
    kind: str = ""  # veth, bond, vlan, ...; empty for hardware
    master_index: int = 0
    slave_kind: str = ""  # bond, team, bridge, vrf: what it is enslaved to
    lower_index: int = 0  # the device it is stacked on (VLAN, macvlan), 0 for none and for a veth's peer
    counters: Counters = Counters()


class LinkMode(msgspec.Struct, frozen=True):
    """What two ends agreed on. None and empty where the device does not know."""

    speed_mbit: int | None = None
    duplex: str = ""  # full, half


class Links(Protocol):
    """All raise HostError. Indexes, not names, because a device can be renamed while a fault is in force."""

    def nics(self) -> tuple[Nic, ...]: ...
    def addresses(self, index: int) -> tuple[Address, ...]: ...
    def all_addresses(self) -> dict[int, tuple[Address, ...]]: ...
    def routes(self, index: int) -> tuple[Route, ...]: ...
    def neighbours(self, index: int) -> tuple[Neighbour, ...]: ...
    def default_route_indexes(self) -> frozenset[int]: ...
    def set_up(self, nic: Nic, *, up: bool) -> None: ...

    def add_address(self, device: str, address: Address, passed_s: float) -> bool:
        """False if its lifetime is over. An address that is there already is no error."""
        ...

    def add_route(self, device: str, route: Route, passed_s: float, *, append: bool) -> bool:
        """False if it expired, or if another route holds its place and was left alone."""
        ...

    def add_neighbour(self, device: str, neighbour: Neighbour) -> bool: ...
    def link_mode(self, name: str) -> LinkMode: ...


def find(nics: tuple[Nic, ...], name: str) -> Nic | None:
    return next((nic for nic in nics if nic.name == name), None)


class NetlinkLinks:
    """The kernel's devices in the network namespace of the calling thread."""

    def __init__(self, rtnl: Rtnl | None = None) -> None:
        self._rtnl = rtnl or Rtnl()

    def nics(self) -> tuple[Nic, ...]:
        answers = self._rtnl.dump(RTM_GETLINK, IFINFO.pack(0, 0, 0, 0, 0), "list network devices")
        return tuple(_nic(body) for kind, body in answers if kind == RTM_NEWLINK)

    def addresses(self, index: int) -> tuple[Address, ...]:
        return self.all_addresses().get(index, ())

    def all_addresses(self) -> dict[int, tuple[Address, ...]]:
        answers = self._rtnl.dump(RTM_GETADDR, IFADDR.pack(0, 0, 0, 0, 0), "list addresses")
        result: dict[int, tuple[Address, ...]] = {}
        for kind, body in answers:
            parsed = parse_address(body) if kind == RTM_NEWADDR else None
            if parsed is not None:
                result[parsed[0]] = (*result.get(parsed[0], ()), parsed[1])
        return result

    def routes(self, index: int) -> tuple[Route, ...]:
        return tuple(route for route in self._all_routes() if index in route.devices)

    def default_route_indexes(self) -> frozenset[int]:
        return frozenset(
            i for route in self._all_routes() if route.prefix == 0 and route.type == 1 for i in route.devices
        )

    def neighbours(self, index: int) -> tuple[Neighbour, ...]:
        answers = self._rtnl.dump(RTM_GETNEIGH, NDMSG.pack(0, 0, 0, 0, 0), "list neighbours")
        parsed = (parse_neighbour(body) for kind, body in answers if kind == RTM_NEWNEIGH)
        return tuple(found[1] for found in parsed if found is not None and found[0] == index)

    def set_up(self, nic: Nic, *, up: bool) -> None:
        operation = f"set {nic.name} {'up' if up else 'down'}"
        self._rtnl.request(RTM_NEWLINK, 0, IFINFO.pack(0, 0, nic.index, IFF_UP if up else 0, IFF_UP), operation)

    def add_address(self, device: str, address: Address, passed_s: float) -> bool:
        """IPv6 addresses come back without duplicate address detection: it takes one to two seconds in which the
        address cannot be used, and the address was ours moments ago. The "nodad" mark is taken off afterwards."""
        operation = f"add {address.text} to {device}"
        v6 = address.family == socket.AF_INET6
        body = address.restorable(passed_s, skip_dad=v6)
        if body is None:
            return False
        try:
            self._rtnl.request(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, body, operation)
        except HostError as error:
            if error.errno != errno.EEXIST:
                raise
            return True
        plain = address.restorable(passed_s, skip_dad=False)
        if v6 and plain is not None and plain != body:
            self._rtnl.request(RTM_NEWADDR, NLM_F_REPLACE, plain, operation)
        return True

    def add_route(self, device: str, route: Route, passed_s: float, *, append: bool) -> bool:
        body = route.restorable(passed_s)
        if body is None:
            return False
        mode = NLM_F_APPEND if append else NLM_F_EXCL
        try:
            self._rtnl.request(RTM_NEWROUTE, NLM_F_CREATE | mode, body, f"add route {route.text} dev {device}")
        except HostError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def add_neighbour(self, device: str, neighbour: Neighbour) -> bool:
        operation = f"add neighbour {neighbour.text} dev {device}"
        try:
            self._rtnl.request(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_EXCL, neighbour.restorable(), operation)
        except HostError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def link_mode(self, name: str) -> LinkMode:
        """By ETHTOOL_GSET (netdevice(7), struct ethtool_cmd of linux/ethtool.h)."""
        command = bytearray(44)
        struct.pack_into("=I", command, 0, ETHTOOL_GSET)
        if not _ethtool(name, command):
            return LinkMode()
        low, duplex = struct.unpack_from("=HB", command, 12)
        (high,) = struct.unpack_from("=H", command, 28)
        speed = high << 16 | low
        return LinkMode(None if speed in (0, 0xFFFF, 0xFFFFFFFF) else speed, {0: "half", 1: "full"}.get(duplex, ""))

    def _all_routes(self) -> list[Route]:
        answers = self._rtnl.dump(RTM_GETROUTE, RTMSG.pack(0, 0, 0, 0, 0, 0, 0, 0, 0), "list routes")
        parsed = (parse_route(body) for kind, body in answers if kind == RTM_NEWROUTE)
        return [route for route in parsed if route is not None]


def _ethtool(name: str, command: bytearray) -> bool:
    """Run an ethtool command in place; False if the device does not support it."""
    encoded = name.encode()
    if len(encoded) >= IFNAMSIZ:
        return False
    import ctypes  # here only: it costs a megabyte, and the watchdog needs no speeds

    buffer = (ctypes.c_char * len(command)).from_buffer(command)
    request = struct.pack("16sP16x", encoded, ctypes.addressof(buffer))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            fcntl.ioctl(sock.fileno(), SIOCETHTOOL, request)
    except OSError:
        return False
    return True


def _nic(body: bytes) -> Nic:
    _family, _type, index, flags, _change = IFINFO.unpack_from(body)
    found = attr_map(body, IFINFO.size)
    info = attr_map(found.get(IFLA_LINKINFO, b""))
    kind = info.get(IFLA_INFO_KIND, b"").rstrip(b"\0").decode("ascii", "replace")
    stats = found.get(IFLA_STATS64, b"")
    _rp, _tp, rx, tx, rx_err, tx_err, rx_drop, tx_drop = (
        STATS64.unpack_from(stats) if len(stats) >= STATS64.size else (0,) * 8
    )
    up = bool(flags & IFF_UP)
    lower = u32(found.get(IFLA_LINK)) or 0
    # A veth names its peer here, and a device of another namespace is none of ours.
    stacked = lower if lower != index and IFLA_LINK_NETNSID not in found and kind != "veth" else 0
    return Nic(
        name=found.get(IFLA_IFNAME, b"").rstrip(b"\0").decode("utf-8", "replace"),
        index=index,
        mac=found.get(IFLA_ADDRESS, b"").hex(":"),
        mtu=u32(found.get(IFLA_MTU)) or 0,
        up=up,
        carrier=up and found.get(IFLA_CARRIER, b"\1") != b"\0",
        kind=kind,
        master_index=u32(found.get(IFLA_MASTER)) or 0,
        slave_kind=info.get(IFLA_INFO_SLAVE_KIND, b"").rstrip(b"\0").decode("ascii", "replace"),
        lower_index=stacked,
        counters=Counters(rx, tx, rx_err, tx_err, rx_drop, tx_drop, u32(found.get(IFLA_CARRIER_CHANGES)) or 0),
    )
