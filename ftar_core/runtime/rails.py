"""FTAR_RAILS: which network interfaces carry the data of this rank.

Three forms, freely mixed in a comma list:

    rail0                      a device of that name; its first IPv4 address, or else its first global IPv6 address
    rail0=10.1.0.3             this address; the device is the one that has it
    rail0=10.1.0.3@ens1f0      this address on this device

Sockets are bound to the device of their rail, so that the kernel does not move a flow to another NIC behind our back. A
loopback address has no device: there is no second path to move to, and every process may use 127.0.0.0/8.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from ftar_core.errors import SettingsError
from ftar_core.wire.ids import valid_name

VARIABLE = "FTAR_RAILS"
MAX_RAILS = 16
_FORMS = "write device names, NAME=ADDRESS or NAME=ADDRESS@DEVICE, separated by commas; see: ip -brief address"


@dataclass(frozen=True)
class Rail:
    """One rail. `device` "" means: do not bind to a device (loopback)."""

    name: str
    device: str
    address: str


Interfaces = Mapping[str, Sequence[str]]  # device -> its IPv4 and IPv6 addresses, in the kernel's order


def interfaces() -> dict[str, list[str]]:
    """The devices of this network namespace with their addresses (no link-local ones: they need a scope)."""
    found: dict[str, list[str]] = {}
    for device, entries in psutil.net_if_addrs().items():
        addresses = [e.address.partition("%")[0] for e in entries if e.family in {socket.AF_INET, socket.AF_INET6}]
        found[device] = [a for a in addresses if not ipaddress.ip_address(a).is_link_local]
    return found


def parse_rails(text: str, look: Callable[[], Interfaces] = interfaces) -> tuple[Rail, ...]:
    """The rails in `text`. Raises SettingsError that names the variable, the entry, the reason and the fix."""
    present: Interfaces | None = None
    rails: list[Rail] = []
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            raise _wrong(text, "an empty entry", _FORMS)
        if present is None:
            present = look()
        rail = _parse_one(entry, present)
        if any(other.name == rail.name for other in rails):
            raise _wrong(text, f"the rail {rail.name!r} is named twice", "give each rail a name of its own")
        if any(other.address == rail.address for other in rails):
            raise _wrong(text, f"two rails have the address {rail.address}", "give each rail an address of its own")
        rails.append(rail)
    if len(rails) > MAX_RAILS:
        raise _wrong(text, f"{len(rails)} rails, at most {MAX_RAILS} are supported", "name fewer")
    return tuple(rails)


def _parse_one(entry: str, present: Interfaces) -> Rail:
    name, equals, rest = entry.partition("=")
    if not valid_name(name):
        hint = "rail names are 1 to 63 of [a-z0-9._-]"
        if not equals and name in present:
            hint += f"; for this device write for example rail0=ADDRESS@{name}"
        raise _wrong(entry, f"{name!r} is no name for a rail", hint)
    if not equals:
        return Rail(name, _bound(name, _first_address(name, present)), _first_address(name, present))
    address_text, at, device = rest.partition("@")
    try:
        address = str(ipaddress.ip_address(address_text.strip("[]")))
    except ValueError:
        raise _wrong(entry, f"{address_text!r} is no IPv4 or IPv6 address", _FORMS) from None
    if at:
        _known(device, present)
        if address not in present[device] and not ipaddress.ip_address(address).is_loopback:
            here = ", ".join(present[device]) or "none"
            raise _wrong(entry, f"{device} does not have the address {address} (it has: {here})", _FORMS)
        return Rail(name, _bound(device, address), address)
    if ipaddress.ip_address(address).is_loopback:
        return Rail(name, "", address)
    owners = [owner for owner, addresses in present.items() if address in addresses]
    if not owners:
        raise _wrong(entry, f"no device of this machine has the address {address}", "see: ip -brief address")
    if len(owners) > 1:
        raise _wrong(entry, f"{' and '.join(owners)} both have {address}", f"write {name}={address}@{owners[0]}")
    return Rail(name, owners[0], address)


def _first_address(device: str, present: Interfaces) -> str:
    _known(device, present)
    by_version = sorted(present[device], key=lambda a: ipaddress.ip_address(a).version)
    if not by_version:
        raise _wrong(device, f"the device {device} has no address", f"run: ip addr add ADDRESS/PREFIX dev {device}")
    return by_version[0]


def _known(device: str, present: Interfaces) -> None:
    if device not in present:
        names = ", ".join(sorted(present)) or "none"
        raise _wrong(device, f"there is no network device {device!r} (there are: {names})", _FORMS)


def _bound(device: str, address: str) -> str:
    return "" if ipaddress.ip_address(address).is_loopback else device


def _wrong(value: str, reason: str, hint: str) -> SettingsError:
    return SettingsError(f"{VARIABLE}={value!r}: {reason}", hint=hint)
