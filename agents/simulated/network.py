"""The network of a node that exists only in memory: what faults change can be looked at, and is gone with the node.

Setting a device down forgets what Linux forgets (IPv6 addresses), so that taking it back has something to restore.
"""

from __future__ import annotations

import errno
import socket

import msgspec

from agents.host.errors import HostError
from agents.host.links import Counters, LinkMode, Nic
from agents.host.netobjects import FOREVER_S, Address, Neighbour, Route
from agents.host.qdiscs import TC_H_ROOT, Qdisc

SPEED_MBIT = 400_000
FIRST_INDEX = 2
IFA_F_PERMANENT = 0x80


class SimulatedLinks:
    """Devices with an IPv4 and an IPv6 address each; `number` (from 0) is the node's, and part of its addresses."""

    def __init__(self, names: tuple[str, ...], number: int) -> None:
        self._devices: dict[int, Nic] = {}
        self._addresses: dict[int, list[Address]] = {}
        high, low = divmod(number, 250)
        for place, name in enumerate(names):
            index = FIRST_INDEX + place
            mac = f"02:{place:02x}:00:00:{high:02x}:{low:02x}"
            self._devices[index] = Nic(
                name=name, index=index, mac=mac, mtu=9000, up=True, carrier=True, counters=Counters(carrier_changes=1)
            )
            self._addresses[index] = [
                _address(socket.AF_INET, f"10.{100 + place}.{high}.{low + 1}", 16),
                _address(socket.AF_INET6, f"fd00:{place:x}::{number + 1:x}", 64),
            ]

    def nics(self) -> tuple[Nic, ...]:
        return tuple(self._devices.values())

    def addresses(self, index: int) -> tuple[Address, ...]:
        return tuple(self._addresses.get(index, ()))

    def all_addresses(self) -> dict[int, tuple[Address, ...]]:
        return {index: tuple(found) for index, found in self._addresses.items()}

    def routes(self, index: int) -> tuple[Route, ...]:
        return ()

    def neighbours(self, index: int) -> tuple[Neighbour, ...]:
        return ()

    def default_route_indexes(self) -> frozenset[int]:
        return frozenset()

    def set_up(self, nic: Nic, *, up: bool) -> None:
        device = self._devices.get(nic.index)
        if device is None:
            raise HostError(f"set {nic.name} {'up' if up else 'down'}", errno.ENODEV)
        if device.up and not up:
            self._addresses[nic.index] = [a for a in self._addresses[nic.index] if a.family == socket.AF_INET]
        changes = device.counters.carrier_changes + (device.carrier is not up)
        counters = msgspec.structs.replace(device.counters, carrier_changes=changes)
        self._devices[nic.index] = msgspec.structs.replace(device, up=up, carrier=up, counters=counters)

    def add_address(self, device: str, address: Address, passed_s: float) -> bool:
        index = next((nic.index for nic in self.nics() if nic.name == device), None)
        if index is None:
            raise HostError(f"add {address.text} to {device}", errno.ENODEV)
        if address.key not in {known.key for known in self._addresses[index]}:
            self._addresses[index].append(address)
        return True

    def add_route(self, device: str, route: Route, passed_s: float, *, append: bool) -> bool:
        raise HostError(f"add a route to {device}", errno.EOPNOTSUPP)

    def add_neighbour(self, device: str, neighbour: Neighbour) -> bool:
        raise HostError(f"add a neighbour to {device}", errno.EOPNOTSUPP)

    def link_mode(self, name: str) -> LinkMode:
        return LinkMode(SPEED_MBIT, "full")


class SimulatedNft:
    """Tables by name; they match nothing, since nothing is sent."""

    def __init__(self) -> None:
        self._tables: set[str] = set()

    def unsupported(self) -> str:
        return ""

    def load(self, ruleset: str, operation: str) -> None:
        name = ruleset.split(None, 3)[2]
        if name in self._tables:
            raise HostError(operation, errno.EEXIST)
        self._tables.add(name)

    def packets(self, table: str) -> int | None:
        return 0 if table in self._tables else None

    def delete(self, table: str) -> bool:
        there = table in self._tables
        self._tables.discard(table)
        return there


class SimulatedQdiscs:
    """At most one root discipline a device."""

    def __init__(self) -> None:
        self._roots: dict[int, Qdisc] = {}

    def unsupported(self, kind: str) -> str:
        return ""

    def of(self, index: int) -> tuple[Qdisc, ...]:
        return (self._roots.get(index, Qdisc("noqueue", 0, TC_H_ROOT)),)

    def add_root(self, index: int, handle: int, kind: str, options: bytes, operation: str) -> None:
        if index in self._roots:
            raise HostError(operation, errno.EEXIST)
        self._roots[index] = Qdisc(kind, handle, TC_H_ROOT)

    def remove_root(self, index: int, handle: int, operation: str) -> None:
        if index in self._roots and self._roots[index].handle == handle:
            del self._roots[index]


def _address(family: int, ip: str, prefix: int) -> Address:
    return Address(family, ip, "", prefix, 0, IFA_F_PERMANENT, FOREVER_S, FOREVER_S, b"")
