"""Builds the lab's network through netlink: the fabric with its bridges, and each node's ports.

Runs in the keeper, which holds the namespaces. Nothing here needs undoing: the devices go with their namespaces.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ftctl.lab.layout import FABRIC_ADDRESS, Node, Rail, rate_bits
from ftctl.lab.namespaces import NamespaceError

IFA_F_NODAD = 0x02  # an address that is usable at once: nobody else can have it here
TBF_ROOT = 0x10000
# A burst of a few full GSO packets keeps the shaper exact without letting a bucket's worth through at once; 20 ms of
# queue is a switch port's, not a modem's.
TBF_BURST_BYTES = 256 * 1024
TBF_LATENCY = "20ms"
# A bridge's port may forward a moment later than the NIC has carrier, unlike a switch's, and the first question for a
# neighbour gets lost: the kernel would repeat it after a second.
NEIGHBOUR_RETRY_MS = 20

Inside = Callable[[int], AbstractContextManager[None]]


def build(fabric: int, hosts: dict[str, int], nodes: Sequence[Node], rate: str, inside: Inside) -> None:
    """Make everything in the namespaces given by file descriptor. Raises NamespaceError."""
    step = "the fabric"
    try:
        with inside(fabric):
            _build_fabric(nodes, hosts, rate)
        for node in nodes:
            step = f"{node.name}'s network"
            with inside(hosts[node.name]):
                _build_node(node, rate)
    except NetlinkError as error:
        raise NamespaceError(f"{step} cannot be made: {error}", _hint(error.code)) from None


def _hint(code: int) -> str:
    if code in (errno.EOPNOTSUPP, errno.ENOENT):
        return "the kernel lacks a module: try sudo modprobe -a veth bridge"
    if code == errno.EPERM:
        return "run as root, or check with ftctl doctor"
    return ""


def _build_fabric(nodes: Sequence[Node], hosts: dict[str, int], rate: str) -> None:
    # The switches have no business with IPv6 of their own.
    _quiet_ipv6(("all", "default"), (("disable_ipv6", "1"),))
    with IPRoute() as ip:
        ip.link("set", index=_index(ip, "lo"), state="up")
        bridges: dict[str, int] = {}
        for bridge in sorted({device.bridge for node in nodes for device in node.devices()}):
            # Snooping would wait for a multicast querier that is not there; STP would hold ports back for 30 s.
            ip.link("add", ifname=bridge, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
            bridges[bridge] = _index(ip, bridge)
            ip.link("set", index=bridges[bridge], state="up")
        ip.addr("add", index=bridges["br-mgmt"], address=FABRIC_ADDRESS, prefixlen=24)
        for node in nodes:
            for device in node.devices():
                peer = {"ifname": device.name, "net_ns_fd": hosts[node.name]}
                ip.link("add", ifname=device.port, kind="veth", peer=peer)
                port = _index(ip, device.port)
                ip.link("set", index=port, master=bridges[device.bridge], state="up")
                if rate and device is not node.management:
                    _limit(ip, port, rate)


def _build_node(node: Node, rate: str) -> None:
    # Addresses are ours alone: no router advertisements, no link-local ones by themselves, no duplicate detection.
    quiet = (("addr_gen_mode", "1"), ("accept_ra", "0"), ("autoconf", "0"), ("accept_dad", "0"))
    _quiet_ipv6(("all", "default", *(device.name for device in node.devices())), quiet)
    with IPRoute() as ip:
        ip.link("set", index=_index(ip, "lo"), state="up")
        for device in node.devices():
            index = _index(ip, device.name)
            ip.link("set", index=index, state="up")
            _retry_neighbours(device.name)
            ip.addr("add", index=index, address=device.address, prefixlen=24)
            if device.address6:
                _add_ipv6(ip, index, device)
            if rate and device is not node.management:
                _limit(ip, index, rate)


def _retry_neighbours(device: str) -> None:
    for family in ("ipv4", "ipv6"):
        with suppress(OSError):  # a read-only /proc/sys: a rail that comes back may be slower
            Path(f"/proc/sys/net/{family}/neigh/{device}/retrans_time_ms").write_text(str(NEIGHBOUR_RETRY_MS))


def _add_ipv6(ip: Any, index: int, device: Rail) -> None:
    try:
        ip.addr("add", index=index, address=device.address6, prefixlen=64, flags=IFA_F_NODAD)
    except NetlinkError as error:
        if error.code not in (
            errno.EOPNOTSUPP,
            errno.EACCES,
            errno.EAFNOSUPPORT,
        ):  # a kernel without IPv6: IPv4 carries all
            raise


def _limit(ip: Any, index: int, rate: str) -> None:
    """Shape what leaves this device. Raises NamespaceError when the kernel has no tbf."""
    bits = rate_bits(rate)
    try:
        ip.tc("add", "tbf", index, TBF_ROOT, rate=bits // 8, burst=TBF_BURST_BYTES, latency=TBF_LATENCY)
    except NetlinkError as error:
        if error.code in (errno.ENOENT, errno.EOPNOTSUPP):
            raise NamespaceError(
                f"--rate {rate} needs the kernel module sch_tbf, which is not there",
                "sudo modprobe sch_tbf, or leave --rate out",
            ) from None
        raise


def _index(ip: Any, name: str) -> int:
    found: list[int] = ip.link_lookup(ifname=name)
    if not found:
        raise NamespaceError(f"device {name} did not appear")
    return found[0]


def _quiet_ipv6(devices: Sequence[str], settings: Sequence[tuple[str, str]]) -> None:
    """Best effort: a container may mount /proc/sys read-only, and then the noise is only noise."""
    for device in devices:
        for key, value in settings:
            try:
                Path(f"/proc/sys/net/ipv6/conf/{device}/{key}").write_text(value)
            except OSError:
                continue
