"""Take a NIC down, as `ip link set rail0 down` does, and bring it back with all that the kernel forgot.

Setting a link down makes the kernel drop its routes, its IPv6 addresses and its permanent neighbours; setting it up
again brings back only what the kernel itself makes (connected routes, a link-local address). So the record holds every
address, route (all tables, both families) and permanent neighbour of the device before the fault. Right after the fault
it is narrowed to what really vanished: what was still there and is missing later was taken away by somebody else, and
stays away. A route whose place is taken by somebody else's meanwhile (a routing daemon's detour) is left to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import nics
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.links import Nic
from agents.host.machine import Machine
from agents.host.netobjects import Address, Neighbour, Route

BONDS = ("bond", "team")


class LinkDownUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device as it was. `read_boot_s` (CLOCK_BOOTTIME) dates the lifetimes. `narrowed`: see `settled`."""

    nic: str
    index: int
    mac: str
    netns: int
    read_boot_s: float
    addresses: tuple[Address, ...]
    routes: tuple[Route, ...]
    neighbours: tuple[Neighbour, ...]
    narrowed: bool = False


class LinkDown(Fault[LinkDownUndo]):
    spec = SPECS["link-down"]
    undo_type = LinkDownUndo
    privileged = True

    def unsupported(self, machine: Machine) -> str:
        return nics.no_right(machine)

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        refusal = nics.refusal(machine, target)
        if refusal is not None:
            return refusal
        known = machine.links.nics()
        nic = nics.planned(machine, target)
        return self._company(machine, nic, known) or self._routes(machine, nic)

    def _company(self, machine: Machine, nic: Nic, known: tuple[Nic, ...]) -> Refusal | None:
        """Devices that hang on this one would go down too, and are not ours to restore."""
        if nic.slave_kind in BONDS:
            master = next((n.name for n in known if n.index == nic.master_index), "?")
            return Refusal("refused", f"{nic.name} is a member of {nic.slave_kind} {master}")
        upper = next((n.name for n in known if n.lower_index == nic.index), None)
        if upper is not None:
            return Refusal("refused", f"{upper} is stacked on {nic.name} and would go down with it")
        if machine.sysfs.shows(nic.name, nic.index) and (count := machine.sysfs.virtual_functions(nic.name)):
            return Refusal("refused", f"{nic.name} has {count} virtual functions, which would go down with it")
        return None

    def _routes(self, machine: Machine, nic: Nic) -> Refusal | None:
        for route in machine.links.routes(nic.index):
            if route.nexthop_object:
                reason = f"route {route.text} of {nic.name} uses a nexthop object, which could not be put back"
                return Refusal("unsupported", reason)
        return None

    def plan(self, machine: Machine, target: Target, params: Params) -> LinkDownUndo:
        nic = nics.planned(machine, target)
        return LinkDownUndo(
            nic=nic.name,
            index=nic.index,
            mac=nic.mac,
            netns=machine.netns,
            read_boot_s=machine.clock.boot_s(),
            addresses=tuple(a for a in machine.links.addresses(nic.index) if not a.temporary),
            routes=tuple(r for r in machine.links.routes(nic.index) if not r.kernels),
            neighbours=machine.links.neighbours(nic.index),
        )

    def inject(self, machine: Machine, undo: LinkDownUndo) -> None:
        nic = nics.same(machine, undo)
        if nic is None:
            raise HostError(f"set {undo.nic} down", 0, "it has just vanished")
        machine.links.set_up(nic, up=False)

    def settled(self, machine: Machine, undo: LinkDownUndo) -> LinkDownUndo:
        addresses = {a.key for a in machine.links.addresses(undo.index)}
        routes = {r.key for r in machine.links.routes(undo.index)}
        neighbours = {n.key for n in machine.links.neighbours(undo.index)}
        return msgspec.structs.replace(
            undo,
            addresses=tuple(a for a in undo.addresses if a.key not in addresses),
            routes=tuple(r for r in undo.routes if r.key not in routes),
            neighbours=tuple(n for n in undo.neighbours if n.key not in neighbours),
            narrowed=True,
        )

    def undo(self, machine: Machine, undo: LinkDownUndo) -> str:
        nic = nics.same(machine, undo)
        if nic is None:
            return f"{undo.nic} does not exist any more: nothing to bring back"
        if not nic.up:
            machine.links.set_up(nic, up=True)
        passed_s = max(0.0, machine.clock.boot_s() - undo.read_boot_s)
        back = _Restoring()
        links = machine.links
        addresses = {a.key for a in links.addresses(nic.index)}
        for address in undo.addresses:
            if address.key not in addresses:
                back.attempt(address.text, partial(links.add_address, nic.name, address, passed_s))
        neighbours = {n.key for n in links.neighbours(nic.index)}
        for neighbour in undo.neighbours:
            if neighbour.key not in neighbours:
                back.attempt(neighbour.text, partial(links.add_neighbour, nic.name, neighbour))
        routes = {r.key for r in links.routes(nic.index)}
        slots = [r.slot for r in undo.routes]
        for route in _gateways_last(undo.routes):
            if route.key not in routes:
                append = slots.count(route.slot) > 1
                back.attempt(route.text, partial(links.add_route, nic.name, route, passed_s, append=append))
        if back.failed:
            raise back.failed[0]
        return f"{nic.name} is up again" + (f", with {', '.join(back.done)}" if back.done else "")

    def probe(self, machine: Machine, undo: LinkDownUndo) -> Probe:
        try:
            nic = nics.same(machine, undo)
        except HostError as error:
            return Probe(None, f"{undo.nic} cannot be looked at: {error}")
        if nic is None:
            return Probe(False, f"{undo.nic} does not exist any more")
        return Probe(not nic.up, f"{nic.name} is {'up' if nic.up else 'down'}")

    def by_hand(self, undo: LinkDownUndo) -> list[str]:
        slots = [r.slot for r in undo.routes]
        return [
            f"ip link set {undo.nic} up",
            *(a.command(undo.nic) for a in undo.addresses),
            *(n.command(undo.nic) for n in undo.neighbours),
            *(r.command(undo.nic, undo.index, append=slots.count(r.slot) > 1) for r in _gateways_last(undo.routes)),
        ]


def _gateways_last(routes: tuple[Route, ...]) -> list[Route]:
    """Gateways are reached through the routes that have none."""
    return sorted(routes, key=lambda r: bool(r.gateway))


class _Restoring:
    """One thing that cannot be put back must not keep the others away: try all, then say what failed."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: list[HostError] = []

    def attempt(self, text: str, restore: Callable[[], bool]) -> None:
        try:
            if restore():
                self.done.append(text)
        except HostError as error:
            self.failed.append(error)
