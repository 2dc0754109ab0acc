"""Addresses, routes and permanent neighbours of one network device, as the kernel told them, ready to be put back.

Each keeps the kernel's own message (`message`, in JSON as base64) beside the fields by which people and comparisons
know it. `restorable` renders the message that puts the object back: without what the kernel only tells (cache
information, state flags) and with lifetimes shortened by the time that has passed.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

import msgspec

from agents.host.rtnl import IFADDR, NDMSG, RTMSG, attr_map, attrs, pack_attr, u32

FOREVER_S = 0xFFFFFFFF
USER_HZ = 100  # of clock_t in rta_cacheinfo, fixed on Linux (sysconf(3) _SC_CLK_TCK)

# linux/if_addr.h
IFA_ADDRESS, IFA_LOCAL, IFA_CACHEINFO, IFA_FLAGS = 1, 2, 6, 8
IFA_F_SECONDARY, IFA_F_NODAD, IFA_F_HOMEADDRESS = 0x01, 0x02, 0x10
IFA_F_MANAGETEMPADDR, IFA_F_NOPREFIXROUTE, IFA_F_MCAUTOJOIN = 0x100, 0x200, 0x400
SETTABLE_FLAGS = IFA_F_NODAD | IFA_F_HOMEADDRESS | IFA_F_MANAGETEMPADDR | IFA_F_NOPREFIXROUTE | IFA_F_MCAUTOJOIN
# linux/rtnetlink.h
RTA_DST, RTA_SRC, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC = 1, 2, 4, 5, 6, 7
RTA_METRICS, RTA_MULTIPATH, RTA_CACHEINFO, RTA_TABLE, RTA_VIA, RTA_EXPIRES, RTA_NH_ID = 8, 9, 12, 15, 18, 23, 30
RTM_F_CLONED = 0x200
RTNH_F_ONLINK = 4
RTPROT_REDIRECT, RTPROT_KERNEL, RTPROT_BOOT, RTPROT_RA = 1, 2, 3, 9
METRICS = {2: "mtu", 3: "window", 8: "advmss", 10: "hoplimit", 11: "initcwnd", 14: "initrwnd"}  # RTAX_*
TABLE_MAIN = 254
ROUTE_TYPES = {1: "", 2: "local ", 3: "broadcast ", 4: "anycast ", 5: "multicast ", 6: "blackhole ", 7: "unreachable "}
RTNEXTHOP = struct.Struct("=HBBi")  # length, flags, hops, index
# linux/neighbour.h
NDA_DST, NDA_LLADDR = 1, 2
NUD_PERMANENT = 0x80
NTF_PROXY = 0x08


def ip_text(family: int, raw: bytes) -> str:
    """ "10.0.0.1" or "fd00::1"; hexadecimal for what is neither."""
    try:
        return str(ipaddress.ip_address(raw)) if family in (socket.AF_INET, socket.AF_INET6) else raw.hex()
    except ValueError:
        return raw.hex()


def family_word(family: int) -> str:
    return "-6 " if family == socket.AF_INET6 else ""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An IPv4 or IPv6 address. Lifetimes in seconds at the time of reading, 0xFFFFFFFF for ever."""

    family: int
    address: str
    peer: str  # of a point-to-point address, else empty
    prefix: int
    scope: int
    flags: int
    valid_s: int
    preferred_s: int
    message: bytes

    @property
    def text(self) -> str:
        return f"{self.address}/{self.prefix}"

    @property
    def key(self) -> tuple[int, str, str, int]:
        return (self.family, self.address, self.peer, self.prefix)

    @property
    def temporary(self) -> bool:
        """A privacy address (RFC 8981): only the kernel can make it, and it makes a new one after link-up."""
        return self.family == socket.AF_INET6 and bool(self.flags & IFA_F_SECONDARY)

    def command(self, device: str) -> str:
        peer = f" peer {self.peer}" if self.peer else ""
        extra = " noprefixroute" if self.flags & IFA_F_NOPREFIXROUTE else ""
        extra += " nodad" if self.flags & IFA_F_NODAD else ""
        for name, seconds in (("valid_lft", self.valid_s), ("preferred_lft", self.preferred_s)):
            extra += f" {name} {seconds}" if seconds != FOREVER_S else ""
        return f"ip {family_word(self.family)}address replace {self.address}{peer}/{self.prefix} dev {device}{extra}"

    def restorable(self, passed_s: float, *, skip_dad: bool) -> bytes | None:
        """The RTM_NEWADDR body that puts the address back; None if its lifetime is over.

        `skip_dad` leaves duplicate address detection (RFC 4862 5.4) out, so that the address is usable at once.
        """
        family, prefix, _flags, scope, index = IFADDR.unpack_from(self.message)
        if self.valid_s != FOREVER_S and self.valid_s <= passed_s:
            return None
        valid = self.valid_s if self.valid_s == FOREVER_S else int(self.valid_s - passed_s)
        preferred = self.preferred_s if self.preferred_s == FOREVER_S else max(0, int(self.preferred_s - passed_s))
        flags = self.flags & SETTABLE_FLAGS | (IFA_F_NODAD if skip_dad else 0)
        body = IFADDR.pack(family, prefix, flags & 0xFF, scope, index)
        for kind, value in attrs(self.message, IFADDR.size):
            if kind not in (IFA_CACHEINFO, IFA_FLAGS):
                body += pack_attr(kind, value)
        body += pack_attr(IFA_FLAGS, struct.pack("=I", flags))
        return body + pack_attr(IFA_CACHEINFO, struct.pack("=IIII", preferred, valid, 0, 0))


def parse_address(body: bytes) -> tuple[int, Address] | None:
    """(device index, address) from an RTM_NEWADDR body; None for families that are not IP."""
    family, prefix, header_flags, scope, index = IFADDR.unpack_from(body)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    found = attr_map(body, IFADDR.size)
    first, local = found.get(IFA_ADDRESS, b""), found.get(IFA_LOCAL)
    own = local if local is not None else first
    peer = ip_text(family, first) if local is not None and first != local else ""
    cache = found.get(IFA_CACHEINFO, b"")
    preferred, valid = struct.unpack_from("=II", cache) if len(cache) >= 8 else (FOREVER_S, FOREVER_S)
    flags = u32(found.get(IFA_FLAGS))
    flags = header_flags if flags is None else flags
    return index, Address(family, ip_text(family, own), peer, prefix, scope, flags, valid, preferred, bytes(body))


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route of one or several devices. `key` is equal for equal routes; `slot` is what the kernel allows once."""

    family: int
    table: int
    protocol: int
    type: int
    destination: str
    prefix: int
    gateway: str
    priority: int
    prefsrc: str
    tos: int
    devices: tuple[int, ...]
    nexthop_object: bool
    expires_s: int  # 0: never
    message: bytes

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.slot, self.type, self.gateway, self.prefsrc, self.devices)

    @property
    def slot(self) -> tuple[object, ...]:
        return (self.family, self.table, self.destination, self.prefix, self.tos, self.priority)

    @property
    def kernels(self) -> bool:
        """Made by the kernel itself from addresses or router advertisements, and made again by it after link-up."""
        return self.protocol in (RTPROT_REDIRECT, RTPROT_KERNEL, RTPROT_RA)

    @property
    def text(self) -> str:
        table = "" if self.table == TABLE_MAIN else f" table {self.table}"
        via = f" via {self.gateway}" if self.gateway and len(self.devices) < 2 else ""
        where = "default" if self.prefix == 0 else f"{self.destination}/{self.prefix}"
        metric = f" metric {self.priority}" if self.priority else ""
        return f"{ROUTE_TYPES.get(self.type, '')}{where}{via}{table}{metric}"

    def command(self, device: str, index: int = 0, *, append: bool = False) -> str:
        """As one would type it. Next hops over other devices are named by their index, which `ip link` lists. `append`:
        beside others of the same destination and metric, which `add` would not take."""
        words = [f"ip {family_word(self.family)}route {'append' if append else 'add'} {self.text}"]
        found = attr_map(self.message, RTMSG.size)
        if RTA_MULTIPATH in found:
            words += [_hop_words(self.family, hop, device, index) for hop in _nexthops(found[RTA_MULTIPATH])]
        else:
            words.append(f"dev {device}")
        if self.prefsrc:
            words.append(f"src {self.prefsrc}")
        if self.protocol not in (0, RTPROT_BOOT):
            words.append(f"proto {self.protocol}")
        metrics = attr_map(found.get(RTA_METRICS, b""))
        words += [f"{name} {u32(metrics[kind])}" for kind, name in METRICS.items() if kind in metrics]
        if RTMSG.unpack_from(self.message)[8] & RTNH_F_ONLINK:
            words.append("onlink")
        return " ".join(words)

    def restorable(self, passed_s: float) -> bytes | None:
        """The RTM_NEWROUTE body that puts the route back; None if it would have expired by now."""
        if self.expires_s and self.expires_s <= passed_s:
            return None
        head = list(RTMSG.unpack_from(self.message))
        head[8] &= RTNH_F_ONLINK
        body = RTMSG.pack(*head)
        for kind, value in attrs(self.message, RTMSG.size):
            if kind == RTA_MULTIPATH:
                body += pack_attr(kind, _without_state(value))
            elif kind not in (RTA_CACHEINFO, RTA_EXPIRES):
                body += pack_attr(kind, value)
        if self.expires_s:
            body += pack_attr(RTA_EXPIRES, struct.pack("=I", int(self.expires_s - passed_s)))
        return body


def _nexthops(value: bytes) -> list[tuple[int, int, int, bytes]]:
    """(flags, hops, device index, attributes) of each next hop of RTA_MULTIPATH."""
    hops = []
    at = 0
    while at + RTNEXTHOP.size <= len(value):
        size, flags, weight, index = RTNEXTHOP.unpack_from(value, at)
        if size < RTNEXTHOP.size or at + size > len(value):
            break
        hops.append((flags, weight, index, value[at + RTNEXTHOP.size : at + size]))
        at += (size + 3) & ~3
    return hops


def _hop_words(family: int, hop: tuple[int, int, int, bytes], device: str, index: int) -> str:
    _flags, hops, hop_index, rest = hop
    gateway = attr_map(rest).get(RTA_GATEWAY)
    via = f" via {ip_text(family, gateway)}" if gateway else ""
    return f"nexthop{via} dev {device if hop_index == index else f'(index {hop_index})'} weight {hops + 1}"


def _without_state(value: bytes) -> bytes:
    """Next hops without "dead" and "link down", which the kernel refuses in requests."""
    out = b""
    for flags, weight, index, rest in _nexthops(value):
        out += RTNEXTHOP.pack(RTNEXTHOP.size + len(rest), flags & RTNH_F_ONLINK, weight, index) + rest
    return out


def parse_route(body: bytes) -> Route | None:
    """From an RTM_NEWROUTE body; None for families that are not IP and for cached exceptions."""
    family, dst_len, _src_len, tos, table, protocol, _scope, kind, flags = RTMSG.unpack_from(body)
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & RTM_F_CLONED:
        return None
    found = attr_map(body, RTMSG.size)
    any_address = "0.0.0.0" if family == socket.AF_INET else "::"  # noqa: S104 (a destination, not a listening address)
    hops = _nexthops(found.get(RTA_MULTIPATH, b""))
    own = u32(found.get(RTA_OIF))
    via = found.get(RTA_VIA)
    gateways = [attr_map(hop[3]).get(RTA_GATEWAY) for hop in hops] or [found.get(RTA_GATEWAY)]
    gateway = ", ".join(ip_text(family, one) for one in gateways if one)
    if via is not None and len(via) > 2:
        gateway = ip_text(int.from_bytes(via[:2], "little"), via[2:])
    cache = found.get(RTA_CACHEINFO, b"")
    expires = struct.unpack_from("=i", cache, 8)[0] // USER_HZ if len(cache) >= 12 else 0
    return Route(
        family=family,
        table=u32(found.get(RTA_TABLE)) or table,
        protocol=protocol,
        type=kind,
        destination=ip_text(family, found[RTA_DST]) if RTA_DST in found else any_address,
        prefix=dst_len,
        gateway=gateway,
        priority=u32(found.get(RTA_PRIORITY)) or 0,
        prefsrc=ip_text(family, found[RTA_PREFSRC]) if RTA_PREFSRC in found else "",
        tos=tos,
        devices=tuple(hop[2] for hop in hops) or (() if own is None else (own,)),
        nexthop_object=RTA_NH_ID in found,
        expires_s=max(0, expires),
        message=bytes(body),
    )


class Neighbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A permanent neighbour (ARP, NDP) entry: the kernel forgets it at link-down."""

    family: int
    address: str
    mac: str
    message: bytes

    @property
    def text(self) -> str:
        return f"{self.address} lladdr {self.mac}"

    @property
    def key(self) -> tuple[int, str]:
        return (self.family, self.address)

    def command(self, device: str) -> str:
        return f"ip {family_word(self.family)}neighbour replace {self.text} dev {device} nud permanent"

    def restorable(self) -> bytes:
        kept = (NDA_DST, NDA_LLADDR)
        head = self.message[: NDMSG.size]
        return head + b"".join(pack_attr(k, v) for k, v in attrs(self.message, NDMSG.size) if k in kept)


def parse_neighbour(body: bytes) -> tuple[int, Neighbour] | None:
    """(device index, entry) of a permanent IP neighbour; None for all others."""
    family, index, state, flags, _kind = NDMSG.unpack_from(body)
    if family not in (socket.AF_INET, socket.AF_INET6) or state != NUD_PERMANENT or flags & NTF_PROXY:
        return None
    found = attr_map(body, NDMSG.size)
    if NDA_DST not in found or NDA_LLADDR not in found:
        return None
    return index, Neighbour(family, ip_text(family, found[NDA_DST]), found[NDA_LLADDR].hex(":"), bytes(body))
