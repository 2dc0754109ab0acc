"""A network that exists only in memory and forgets at link-down what Linux forgets, and a clock that a test turns."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field

import msgspec

from agents.host.errors import HostError
from agents.host.links import LinkMode, Nic
from agents.host.netobjects import FOREVER_S, Address, Neighbour, Route
from agents.host.qdiscs import TC_H_ROOT, Qdisc


def address(text: str) -> Address:
    ip, _, prefix = text.partition("/")
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    return Address(family, ip, "", int(prefix), 0, 0x80, FOREVER_S, FOREVER_S, b"")


def route(destination: str, index: int, *, gateway: str = "", table: int = 254, protocol: int = 3) -> Route:
    ip, _, prefix = destination.partition("/")
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    return Route(
        family=family,
        table=table,
        protocol=protocol,
        type=1,
        destination=ip,
        prefix=int(prefix),
        gateway=gateway,
        priority=0,
        prefsrc="",
        tos=0,
        devices=(index,),
        nexthop_object=False,
        expires_s=0,
        message=bytes(12),  # a struct rtmsg without attributes
    )


@dataclass
class FakeLinks:
    """Keeps `devices`, `addrs`, `table` and `neighs`; `broken` operations fail with the given errno."""

    devices: dict[int, Nic] = field(default_factory=dict)
    addrs: dict[int, list[Address]] = field(default_factory=dict)
    table: list[Route] = field(default_factory=list)
    neighs: dict[int, list[Neighbour]] = field(default_factory=dict)
    defaults: frozenset[int] = frozenset()
    broken: dict[str, int] = field(default_factory=dict)
    deaf: set[str] = field(default_factory=set)  # operations that say yes and do nothing
    calls: list[str] = field(default_factory=list)
    modes: dict[str, LinkMode] = field(default_factory=dict)

    def add(self, name: str, **kwargs: object) -> Nic:
        index = len(self.devices) + 2
        values: dict[str, object] = {"up": True, "carrier": True, **kwargs}
        nic = Nic(name=name, index=index, mac=f"02:00:00:00:00:{index:02x}", mtu=1500, **values)  # type: ignore[arg-type]
        self.devices[index] = nic
        self.addrs[index] = []
        self.neighs[index] = []
        return nic

    def change(self, index: int, **kwargs: object) -> None:
        self.devices[index] = msgspec.structs.replace(self.devices[index], **kwargs)

    def _enter(self, operation: str) -> bool:
        self.calls.append(operation)
        if operation in self.broken:
            raise HostError(operation, self.broken[operation])
        return operation not in self.deaf

    def nics(self) -> tuple[Nic, ...]:
        self._enter("nics")
        return tuple(self.devices.values())

    def addresses(self, index: int) -> tuple[Address, ...]:
        return tuple(self.addrs.get(index, ()))

    def all_addresses(self) -> dict[int, tuple[Address, ...]]:
        return {index: tuple(found) for index, found in self.addrs.items()}

    def routes(self, index: int) -> tuple[Route, ...]:
        return tuple(r for r in self.table if index in r.devices)

    def neighbours(self, index: int) -> tuple[Neighbour, ...]:
        return tuple(self.neighs.get(index, ()))

    def default_route_indexes(self) -> frozenset[int]:
        return self.defaults

    def set_up(self, nic: Nic, *, up: bool) -> None:
        if not self._enter("up" if up else "down"):
            return
        if nic.index not in self.devices:
            raise HostError(f"set {nic.name}", errno.ENODEV)
        if not up and self.devices[nic.index].up:
            self.table = [r for r in self.table if nic.index not in r.devices]
            self.addrs[nic.index] = [a for a in self.addrs[nic.index] if a.family == socket.AF_INET]
            self.neighs[nic.index] = []
        self.change(nic.index, up=up, carrier=up)

    def add_address(self, device: str, address: Address, passed_s: float) -> bool:
        self._enter("add_address")
        index = self._index(device)
        if address.valid_s != FOREVER_S and address.valid_s <= passed_s:
            return False
        self.addrs[index].append(address)
        return True

    def add_route(self, device: str, route: Route, passed_s: float, *, append: bool) -> bool:
        self._enter("add_route")
        if not append and any(r.slot == route.slot for r in self.table):
            return False
        self.table.append(route)
        return True

    def add_neighbour(self, device: str, neighbour: Neighbour) -> bool:
        self.neighs[self._index(device)].append(neighbour)
        return True

    def link_mode(self, name: str) -> LinkMode:
        return self.modes.get(name, LinkMode(10_000, "full"))

    def _index(self, name: str) -> int:
        return next(i for i, nic in self.devices.items() if nic.name == name)


@dataclass
class FakeClock:
    boot: float = 1000.0
    wall: float = 1_700_000_000.0
    id: str = "boot-1"

    def boot_s(self) -> float:
        return self.boot

    def wall_s(self) -> float:
        return self.wall

    def boot_id(self) -> str:
        return self.id


@dataclass
class FakeNft:
    """Tables by name, with the text that made them."""

    tables: dict[str, str] = field(default_factory=dict)
    missing: str = ""

    def unsupported(self) -> str:
        return self.missing

    def load(self, ruleset: str, operation: str) -> None:
        name = ruleset.split()[2]
        if name in self.tables:
            raise HostError(operation, errno.EEXIST)
        self.tables[name] = ruleset

    def packets(self, table: str) -> int | None:
        return 0 if table in self.tables else None

    def delete(self, table: str) -> bool:
        return self.tables.pop(table, None) is not None


@dataclass
class FakeQdiscs:
    """At most one root of somebody's a device; `lacking` kinds are not in this kernel."""

    roots: dict[int, Qdisc] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()

    def unsupported(self, kind: str) -> str:
        return f"this kernel has no {kind}" if kind in self.lacking else ""

    def of(self, index: int) -> tuple[Qdisc, ...]:
        return (self.roots.get(index, Qdisc("noqueue", 0, TC_H_ROOT)),)

    def add_root(self, index: int, handle: int, kind: str, options: bytes, operation: str) -> None:
        if index in self.roots:
            raise HostError(operation, errno.EEXIST)
        self.roots[index] = Qdisc(kind, handle, TC_H_ROOT)

    def remove_root(self, index: int, handle: int, operation: str) -> None:
        if index in self.roots and self.roots[index].handle == handle:
            del self.roots[index]
