"""Just enough rtnetlink (rtnetlink(7), netlink(7)) to read links, addresses, routes and neighbours and put them back.

Routes are kept as the bytes in which the kernel told them and are put back as those bytes, so that no attribute
(metrics, encapsulation, multipath weights) is lost in a translation. That, and weight, are why pyroute2, which the lab
uses, is not used here: an agent and a watchdog a node would carry 10 to 20 MiB more each, and a poll of the links costs
1.8 ms of CPU there and 0.2 ms here (measured with four links).

Every socket is opened for one request and closed after it: no state, safe from any thread. The kernel answers netlink
at once; the timeout exists for a kernel that holds the RTNL lock for long (a driver that hangs).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from agents.host.errors import HostError

# linux/rtnetlink.h
RTM_NEWLINK, RTM_GETLINK = 16, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH, RTM_GETNEIGH = 28, 30
# linux/netlink.h
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR = 0x1, 0x4, 0x10
NLM_F_DUMP, NLM_F_EXCL, NLM_F_CREATE, NLM_F_APPEND = 0x300, 0x200, 0x400, 0x800
NLM_F_CAPPED, NLM_F_ACK_TLVS = 0x100, 0x200
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLMSGERR_ATTR_MSG = 1
SOL_NETLINK, NETLINK_CAP_ACK, NETLINK_EXT_ACK = 270, 10, 11
NLA_TYPE_MASK = 0x3FFF

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
IFINFO = struct.Struct("=BxHiII")  # family, type, index, flags, change
IFADDR = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
RTMSG = struct.Struct("=BBBBBBBBI")  # family, dst_len, src_len, tos, table, protocol, scope, type, flags
NDMSG = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
ATTR = struct.Struct("=HH")

RECEIVE_BYTES = 1 << 17
MAX_MESSAGES = 200_000  # a full internet routing table must not take the agent's memory
DUMP_TRIES = 5


class Attr(NamedTuple):
    type: int
    value: bytes


def align(size: int) -> int:
    """Netlink pads everything to 4 bytes (NLMSG_ALIGNTO)."""
    return (size + 3) & ~3


def attrs(data: bytes, start: int = 0) -> Iterator[Attr]:
    """The attributes in `data` from `start`; stops at the first that does not fit."""
    at = start
    while at + ATTR.size <= len(data):
        size, kind = ATTR.unpack_from(data, at)
        if size < ATTR.size or at + size > len(data):
            return
        yield Attr(kind & NLA_TYPE_MASK, data[at + ATTR.size : at + size])
        at += align(size)


def attr_map(data: bytes, start: int = 0) -> dict[int, bytes]:
    """As `attrs`, by type, of equal ones the last; without an object for each, since a look at all devices has a
    thousand of them."""
    found: dict[int, bytes] = {}
    at, end, head, unpack = start, len(data), ATTR.size, ATTR.unpack_from
    while at + head <= end:
        size, kind = unpack(data, at)
        if size < head or at + size > end:
            break
        found[kind & NLA_TYPE_MASK] = data[at + head : at + size]
        at += (size + 3) & ~3
    return found


def pack_attr(kind: int, value: bytes) -> bytes:
    size = ATTR.size + len(value)
    return ATTR.pack(size, kind) + value + b"\0" * (align(size) - size)


def u32(value: bytes | None) -> int | None:
    return int(struct.unpack("=I", value)[0]) if value is not None and len(value) == 4 else None


class Rtnl:
    """Requests to the kernel in the network namespace of the calling thread."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s

    def dump(self, kind: int, body: bytes, operation: str) -> list[tuple[int, bytes]]:
        """All answers (type, payload) to a dump request. Raises HostError.

        A dump during which the tables changed is inconsistent (NLM_F_DUMP_INTR) and is asked again.
        """
        for _ in range(DUMP_TRIES):
            with self._open(operation) as sock:
                answers, torn = self._exchange(sock, kind, NLM_F_DUMP, body, operation, dump=True)
            if not torn:
                break
        return answers

    def request(self, kind: int, flags: int, body: bytes, operation: str) -> None:
        """One change, acknowledged. Raises HostError with the kernel's words."""
        with self._open(operation) as sock:
            self._exchange(sock, kind, flags | NLM_F_ACK, body, operation, dump=False)

    def _open(self, operation: str) -> socket.socket:
        try:
            sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        except OSError as error:
            raise HostError.of(operation, error) from None
        try:
            sock.settimeout(self._timeout_s)
            sock.bind((0, 0))
            for option in (NETLINK_CAP_ACK, NETLINK_EXT_ACK):
                sock.setsockopt(SOL_NETLINK, option, 1)
        except OSError as error:
            sock.close()
            raise HostError.of(operation, error) from None
        return sock

    def _exchange(
        self, sock: socket.socket, kind: int, flags: int, body: bytes, operation: str, *, dump: bool
    ) -> tuple[list[tuple[int, bytes]], bool]:
        answers: list[tuple[int, bytes]] = []
        torn = False
        try:
            sock.send(HEADER.pack(HEADER.size + len(body), kind, flags | NLM_F_REQUEST, 1, 0) + body)
            while True:
                data = sock.recv(RECEIVE_BYTES)
                at = 0
                while at + HEADER.size <= len(data):
                    size, answer, answer_flags, _sequence, _port = HEADER.unpack_from(data, at)
                    if size < HEADER.size or at + size > len(data):
                        raise HostError(operation, errno.EPROTO, "the kernel's answer is cut off")
                    payload = data[at + HEADER.size : at + size]
                    at += align(size)
                    torn = torn or bool(answer_flags & NLM_F_DUMP_INTR)
                    if answer == NLMSG_ERROR:
                        _check_ack(payload, answer_flags, operation)
                        return answers, torn
                    if answer == NLMSG_DONE:
                        code = struct.unpack_from("=i", payload)[0] if len(payload) >= 4 else 0
                        if code < 0:
                            raise HostError(operation, -code)
                        return answers, torn
                    if dump:
                        answers.append((answer, payload))
                        if len(answers) > MAX_MESSAGES:
                            raise HostError(operation, errno.E2BIG, f"more than {MAX_MESSAGES} entries")
        except TimeoutError:
            text = f"the kernel did not answer within {self._timeout_s:g} s"
            raise HostError(operation, errno.ETIMEDOUT, text) from None
        except OSError as error:
            if error.errno == errno.ENOBUFS and dump:
                return answers, True
            raise HostError.of(operation, error) from None


def _check_ack(payload: bytes, flags: int, operation: str) -> None:
    """An acknowledgement carries a negative errno, 0 for success, and perhaps a sentence."""
    (code,) = struct.unpack_from("=i", payload)
    if code == 0:
        return
    text = ""
    if flags & NLM_F_ACK_TLVS:
        # errno, then the header of our request (capped: without its body), then the attributes
        inner = struct.unpack_from("=I", payload, 4)[0]
        start = 4 + (HEADER.size if flags & NLM_F_CAPPED else align(inner))
        text = attr_map(payload, start).get(NLMSGERR_ATTR_MSG, b"").rstrip(b"\0").decode("utf-8", "replace")
    words = os.strerror(-code)
    raise HostError(operation, -code, f"{words} ({text})" if text else words)
