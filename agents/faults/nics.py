"""What faults on a rail share: the device that is meant, and what speaks against it whatever is done to it.

A device is known by index and namespace, or by index and MAC address: a NIC that was renamed is still ours, a new
device under the old name is not.
"""

from __future__ import annotations

import re
from typing import Protocol

from agents.faults.contract import Refusal, Target
from agents.host.errors import HostError
from agents.host.links import Nic, find
from agents.host.machine import Machine

HELPER_HINT = "run ft-agent-helper as root and name its socket as helper_socket in the agent's configuration"
PLAIN = re.compile(r"[A-Za-z0-9_.:@-]{1,15}\Z")  # a name that needs no quoting in any command


class Named(Protocol):
    """An undo record that names a device."""

    @property
    def index(self) -> int: ...
    @property
    def mac(self) -> str: ...
    @property
    def netns(self) -> int: ...


def same(machine: Machine, undo: Named) -> Nic | None:
    """The device of the record, under whatever name it has now."""
    for nic in machine.links.nics():
        if nic.index == undo.index and (machine.netns == undo.netns or nic.mac == undo.mac):
            return nic
    return None


def no_right(machine: Machine) -> str:
    if machine.net_admin:
        return ""
    return f"the agent has no right to change network devices here (CAP_NET_ADMIN): {HELPER_HINT}"


def refusal(machine: Machine, target: Target) -> Refusal | None:
    """None if there is such a device, and something can be seen on it now."""
    nics = machine.links.nics()
    nic = find(nics, target.nic)
    if nic is None:
        known = ", ".join(n.name for n in nics)
        return Refusal("unknown-nic", f"there is no network device {target.nic} (there are: {known})")
    hint = "ftctl status shows the rails and their state"
    if not PLAIN.match(nic.name):
        return Refusal("unsupported", f"{nic.name!r} is a name that cannot be written in a packet rule")
    if not nic.up:
        return Refusal("refused", f"{nic.name} is down already, and not by a fault of ours", hint)
    if not nic.carrier:
        return Refusal("refused", f"{nic.name} has no carrier already: nothing would be seen on it", hint)
    return None


def planned(machine: Machine, target: Target) -> Nic:
    """Raises HostError."""
    nic = find(machine.links.nics(), target.nic)
    if nic is None:
        raise HostError(f"look at {target.nic}", 0, "it has just vanished")
    return nic


def bypassed(machine: Machine, nic: str) -> str:
    """A warning where an RDMA device sends past the kernel, and so past its packet rules and queues."""
    found = machine.sysfs.rdma_devices(nic)
    if not found:
        return ""
    return f"RDMA device {', '.join(found)} is active on {nic}: its traffic does not pass the kernel and is not hit"
