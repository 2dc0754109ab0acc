"""When the kernel's state changed, seen from outside of the agent: netlink's own events, and states of processes.

An event is dated when it is read here, so what is measured is at least what it took.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from pathlib import Path

NETLINK_ROUTE, NETLINK_NETFILTER = 0, 12
RTM_NEWLINK, RTM_NEWQDISC, RTM_DELQDISC = 16, 36, 37
IFF_UP = 1
SOL_NETLINK, ADD_MEMBERSHIP = 270, 1
GROUP_LINK, GROUP_TC, GROUP_NFTABLES = 1, 4, 7
HEADER = struct.Struct("=IHHII")


class Watch:
    """`when` is the Unix time of the first change since `arm`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = False
        self._when: float | None = None

    def arm(self) -> None:
        with self._lock:
            self._armed, self._when = True, None

    def note(self) -> None:
        now = time.time()
        with self._lock:
            if self._armed and self._when is None:
                self._when = now

    def when(self, within_s: float = 20.0) -> float:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            with self._lock:
                if self._when is not None:
                    self._armed = False
                    return self._when
            time.sleep(0.001)
        raise AssertionError("the kernel's state did not change")


class Netlink:
    """What faults on rails change: links that go down, queues, packet rules; in the namespace in which it is made."""

    def __init__(self) -> None:
        self.down, self.queue, self.rules = Watch(), Watch(), Watch()
        self._route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_ROUTE)
        self._route.bind((0, (1 << (GROUP_LINK - 1)) | (1 << (GROUP_TC - 1))))
        self._nft = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._nft.bind((0, 0))
        self._nft.setsockopt(SOL_NETLINK, ADD_MEMBERSHIP, GROUP_NFTABLES)
        self._end_r, self._end_w = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._end_w, b"x")
        self._thread.join(60)
        for sock in (self._route, self._nft):
            sock.close()
        os.close(self._end_r)
        os.close(self._end_w)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._route, self._nft, self._end_r], [], [])
            if self._end_r in ready:
                return
            if self._nft in ready:
                self._nft.recv(1 << 16)
                self.rules.note()
            if self._route in ready:
                data = self._route.recv(1 << 16)
                while len(data) >= HEADER.size:
                    size, kind, _flags, _seq, _pid = HEADER.unpack_from(data)
                    self._of(kind, data[HEADER.size : size])
                    data = data[(size + 3) & ~3 :]

    def _of(self, kind: int, body: bytes) -> None:
        if kind in (RTM_NEWQDISC, RTM_DELQDISC):
            self.queue.note()
        elif kind == RTM_NEWLINK and not struct.unpack_from("=BxHiII", body)[3] & IFF_UP:
            self.down.note()


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
