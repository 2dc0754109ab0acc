"""Two nodes in network namespaces of their own, with a veth and a bridge for every rail, and what can befall a rail.

The namespaces have no names: this process and the nodes hold them, so that when they end, however they end, nothing is
left. Without root they are made inside a user namespace (user_namespaces(7)). This process stays in the namespace of
the switches: the root of a user namespace may not go back to where it came from.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ftar_core.bench.report import BenchError

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
SIOCETHTOOL, ETHTOOL_GLINK = 0x8946, 0x0A
TBF, BLACKHOLE = 0x10000, 0x20000  # handles of queues
TBF_BURST_BYTES = 128 * 1024  # two full GSO packets: below that tbf cannot hold the rate, far above it is no limit
TBF_LATENCY = "20ms"
NODES = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _gain_power() -> None:
    """Be able to make namespaces, as root or as the root of a user namespace. Tried, not judged by the uid."""
    try:
        _checked(_libc.unshare(CLONE_NEWNET), "unshare")
        return
    except OSError as error:
        if error.errno != errno.EPERM:
            raise BenchError(f"no network namespace: {error.strerror}", hint="the kernel needs CONFIG_NET_NS") from None
    uid, gid = os.geteuid(), os.getegid()
    try:
        _checked(_libc.unshare(CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _checked(_libc.unshare(CLONE_NEWNET), "unshare")
    except OSError as error:
        raise BenchError(
            f"network namespaces need root or user namespaces, and uid {uid} gets neither here: {error.strerror}",
            hint="run as root; ftctl doctor says which setting forbids user namespaces",
        ) from None


def _new_network() -> int:
    _checked(_libc.unshare(CLONE_NEWNET), "unshare")
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Network:
    """`rates_mbit`: one for each rail; 0 is as fast as the machine. Rail k of node i is `railK`, 10.79.K.(i+1)."""

    def __init__(self, rates_mbit: Sequence[int] = (0, 0), nodes: int = NODES) -> None:
        self.rates_mbit = rates_mbit
        self.devices = [f"rail{k}" for k in range(len(rates_mbit))]
        self.addresses = [[f"10.79.{k}.{i + 1}" for k in range(len(rates_mbit))] for i in range(nodes)]
        self._spaces: list[int] = []
        self._control: list[socket.socket] = []  # of each space: for ioctl
        self._netlink: Any = None
        self._inner: list[Any] = []  # netlink of each node

    def __enter__(self) -> Network:
        try:
            _gain_power()
            self._spaces = [_new_network() for _ in self.addresses]
            self._fabric = _new_network()  # and here this thread stays
            self._build()
        except (OSError, NetlinkError) as error:
            self.close()
            hint = "the kernel lacks a module: sudo modprobe -a veth bridge sch_tbf"
            raise BenchError(f"the network of the benchmark cannot be made: {error}", hint=hint) from None
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        with suppress(OSError):  # the switches have no business with IPv6; a read-only /proc costs some noise only
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        self._netlink = ip = IPRoute()
        for k in range(len(self.rates_mbit)):
            # STP would hold ports back for 30 s, snooping would wait for a querier that is not there.
            ip.link("add", ifname=f"br{k}", kind="bridge", br_stp_state=0, br_mcast_snooping=0)
            bridge = self._index(ip, f"br{k}")
            ip.link("set", index=bridge, state="up")
            for i, space in enumerate(self._spaces):
                ip.link("add", ifname=f"n{i}r{k}", kind="veth", peer={"ifname": f"rail{k}", "net_ns_fd": space})
                port = self._index(ip, f"n{i}r{k}")
                ip.link("set", index=port, master=bridge, state="up")
                self._limit(ip, port, self.rates_mbit[k])
        for i in range(len(self.addresses)):
            with self.inside(i):
                inner = IPRoute()
                self._inner.append(inner)
                with suppress(OSError):
                    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
                inner.link("set", index=self._index(inner, "lo"), state="up")
                for k, rate in enumerate(self.rates_mbit):
                    index = self._index(inner, f"rail{k}")
                    inner.link("set", index=index, state="up")
                    inner.addr("add", index=index, address=self.addresses[i][k], prefixlen=24)
                    # A bridge's port may forward a moment later than the NIC has carrier, unlike a switch's, and the
                    # first question for the neighbour gets lost: the kernel would repeat it after a second.
                    with suppress(OSError):
                        Path(f"/proc/sys/net/ipv4/neigh/rail{k}/retrans_time_ms").write_text("20")
                    self._limit(inner, index, rate)
                self._control.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._control.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    def join(self, host: str) -> None:
        """This process gets an address of its own on the first rail, on the switch."""
        ip = self._netlink
        ip.link("set", index=self._index(ip, "lo"), state="up")
        ip.addr("add", index=self._index(ip, "br0"), address=host, prefixlen=24)

    def handle(self, node: int) -> int:
        """The file descriptor of the node's namespace: for a process that goes there by itself (setns(2))."""
        return self._spaces[node]

    @staticmethod
    def _index(ip: Any, name: str) -> int:
        found: list[int] = ip.link_lookup(ifname=name)
        if not found:
            raise BenchError(f"device {name} did not appear")
        return found[0]

    @staticmethod
    def _limit(ip: Any, index: int, rate_mbit: int) -> None:
        """Shape what leaves this device."""
        if rate_mbit > 0:
            rate = rate_mbit * 1_000_000 // 8
            ip.tc("replace", "tbf", index, TBF, rate=rate, burst=TBF_BURST_BYTES, latency=TBF_LATENCY)

    @contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """This thread is in the node's namespace, and so is a process that it starts."""
        _checked(_libc.setns(self._spaces[node], CLONE_NEWNET), "setns")
        try:
            yield
        finally:
            _checked(_libc.setns(self._fabric, CLONE_NEWNET), "setns")

    # What befalls a rail. All are one call into the kernel, which is done when they return.

    def link(self, node: int, rail: int, up: bool) -> None:
        """`ip link set railK up|down` on the node."""
        self._flags(self._control[node], f"rail{rail}", up)
        self._notice(self._control[-1], f"n{node}r{rail}")

    def cable(self, node: int, rail: int, plugged: bool) -> None:
        """The far end of the node's cable: its NIC stays up and has no carrier; the other nodes notice nothing."""
        self._flags(self._control[-1], f"n{node}r{rail}", plugged)
        self._notice(self._control[-1], f"n{node}r{rail}")

    def forward(self, node: int, rail: int, on: bool) -> None:
        """The rail carries the node's frames, or they vanish both ways (a blackhole queue at both ends of its cable)
        while everybody has carrier."""
        for ip, device in ((self._inner[node], f"rail{rail}"), (self._netlink, f"n{node}r{rail}")):
            index = self._index(ip, device)
            if not on:
                ip.tc("replace", "blackhole", index, BLACKHOLE)
            elif self.rates_mbit[rail] > 0:
                self._limit(ip, index, self.rates_mbit[rail])
            else:
                ip.tc("del", "blackhole", index, BLACKHOLE)

    @staticmethod
    def _flags(control: socket.socket, device: str, up: bool) -> None:
        request = struct.pack("16sH14x", device.encode(), 0)
        (flags,) = struct.unpack_from("16xH", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", device.encode(), flags))

    @staticmethod
    def _notice(control: socket.socket, port: str) -> None:
        """The kernel tells a bridge of its port's carrier up to a second late when there is much of that news
        (net/core/link_watch.c). A switch is not so; a question for the carrier brings the news at once, on kernels
        from 6.8 on."""
        answer = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_GLINK, 0), 8)
        fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP16x", port.encode(), ctypes.addressof(answer)))

    def close(self) -> None:
        for control in self._control:
            control.close()
        for netlink in (self._netlink, *self._inner):
            if netlink is not None:
                netlink.close()
        for space in self._spaces:
            os.close(space)
        self._spaces, self._control, self._netlink, self._inner = [], [], None, []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
