"""What happens to cables, made and taken back quickly, and the plan of a storm: a pure function of one seed.

`ip` takes tens of milliseconds on a busy machine, too slow for a second fault in the middle of a failover. So each
namespace has one socket here, and an ioctl on it pulls the cable in well under a millisecond.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ..net import Net

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSARP, _SIOCDARP, _SIOCETHTOOL = 0x8913, 0x8914, 0x8955, 0x8953, 0x8946
_IFF_UP = 1
_ARPHRD_ETHER, _ATF_COM, _ATF_PERM = 1, 2, 4
_ETHTOOL_STXCSUM = 0x17
_NOBODY = bytes.fromhex("020000000099")

FREEZE_MS = 200


def socket_in(namespace: str) -> socket.socket:
    """A datagram socket that belongs to the namespace; this process stays where it is."""
    made: list[socket.socket | OSError] = []

    def visit() -> None:  # a thread of its own: the namespace is a thread's property
        try:
            with open(f"/run/netns/{namespace}", "rb") as file:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


class Weather:
    """Makes and lifts faults on the rails of a Net. A fault that is lifted leaves nothing."""

    def __init__(self, net: Net, pids: list[int]) -> None:
        self.net, self.pids = net, pids
        self.sockets = [socket_in(net.ns(i)) for i in range(net.nodes)]
        self.switch = net.names[0]

    def __enter__(self) -> Weather:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        for s in self.sockets:
            s.close()

    def cable(self, node: int, rail: int, up: bool) -> None:
        request = bytearray(struct.pack("16sH22x", f"rail{rail}".encode(), 0))
        fcntl.ioctl(self.sockets[node], _SIOCGIFFLAGS, request)
        flags = struct.unpack_from("H", request, 16)[0]
        struct.pack_into("H", request, 16, flags | _IFF_UP if up else flags & ~_IFF_UP)
        fcntl.ioctl(self.sockets[node], _SIOCSIFFLAGS, request)

    def silence(self, node: int, rail: int, on: bool) -> None:
        """Frames from the node to the other one go to a hardware address that nobody has."""
        address = socket.inet_aton(f"10.77.{rail}.{2 - node}")
        entry = struct.pack(
            "<HH4s8xH6s8xi16x16s",
            socket.AF_INET,
            0,
            address,
            _ARPHRD_ETHER,
            _NOBODY,
            _ATF_COM | _ATF_PERM,
            f"rail{rail}".encode(),
        )
        try:
            fcntl.ioctl(self.sockets[node], _SIOCSARP if on else _SIOCDARP, entry)
        except OSError:  # the cable is out, which also removed the entry
            pass

    def slow(self, node: int, rail: int, mbit: int) -> None:
        """mbit 0: as fast as it was."""
        device = f"rail{rail}"
        words = ["replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "30ms"]
        _run(["tc", "-n", self.net.ns(node), "qdisc", *(words if mbit else ["del", "dev", device, "root"])])

    def corrupt(self, node: int, rail: int, on: bool) -> None:
        """One byte of every 20th TCP segment that the node sends is changed behind its back. On a veth the checksum is
        left out as long as nobody asks for it, so it is asked for first; its receiver has to find the damage."""
        port = f"n{node}r{rail}"
        if on:
            self.checksums(node, rail, True)
            _run(["ip", "netns", "exec", self.switch, "nft", "-f", "-"],
                 f"table netdev {port} {{ chain c {{ type filter hook ingress device {port} priority 0;\n"
                 "ip protocol tcp numgen random mod 20 == 0 @th,256,8 set 0x5a\n}\n}\n")  # fmt: skip
        else:
            _run(["ip", "netns", "exec", self.switch, "nft", "delete", "table", "netdev", port])
            self.checksums(node, rail, False)

    def checksums(self, node: int, rail: int, on: bool) -> None:
        value = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_STXCSUM, 0 if on else 1))
        request = struct.pack("16sP16x", f"rail{rail}".encode(), ctypes.addressof(value))
        fcntl.ioctl(self.sockets[node], _SIOCETHTOOL, request)

    def damaged(self, node: int) -> int:
        """How many TCP segments with a wrong checksum the node has dropped."""
        with open(f"/proc/{self.pids[node]}/net/snmp") as file:
            names, values = (line.split() for line in file if line.startswith("Tcp:"))
        return int(values[names.index("InCsumErrors")])

    def freeze(self, node: int, on: bool) -> None:
        os.kill(self.pids[node], signal.SIGSTOP if on else signal.SIGCONT)


def _run(argv: list[str], text: str = "") -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(argv)}: {done.stderr.strip()}")


def can_corrupt() -> bool:
    """Only if nftables is here."""
    return shutil.which("nft") is not None


@dataclass(frozen=True)
class Fault:
    """From at_ms to at_ms + for_ms after its round began."""

    kind: str
    at_ms: int
    for_ms: int
    node: int
    rail: int
    mbit: int = 0

    def __str__(self) -> str:
        where = f"node{self.node}" + ("" if self.kind == "freeze" else f"/rail{self.rail}")
        rate = f" {self.mbit} Mbit/s" if self.mbit else ""
        return f"{self.kind} {where}{rate} at {self.at_ms} ms for {self.for_ms} ms"

    def begin(self, w: Weather) -> None:
        _ACTS[self.kind](w, self, True)

    def end(self, w: Weather) -> None:
        _ACTS[self.kind](w, self, False)


_ACTS: dict[str, Callable[[Weather, Fault, bool], None]] = {
    "down": lambda w, f, on: w.cable(f.node, f.rail, not on),
    "silent": lambda w, f, on: w.silence(f.node, f.rail, on),
    "slow": lambda w, f, on: w.slow(f.node, f.rail, f.mbit if on else 0),
    "corrupt": lambda w, f, on: w.corrupt(f.node, f.rail, on),
    "freeze": lambda w, f, on: w.freeze(f.node, on),
}


@dataclass(frozen=True)
class Round:
    """Faults that may overlap; all are lifted at the end, then nothing happens for calm_ms."""

    what: str
    faults: list[Fault] = field(default_factory=list)
    calm_ms: int = 0

    def timeline(self) -> list[tuple[int, Fault, bool]]:
        """(milliseconds, fault, begins), in order."""
        events = [(f.at_ms, f, True) for f in self.faults] + [(f.at_ms + f.for_ms, f, False) for f in self.faults]
        return sorted(events, key=lambda e: (e[0], e[2], str(e[1])))


CYCLES = 20


def plan(dice: random.Random, faults: int, rails: int, corrupt: bool) -> list[Round]:
    """Rounds with at least so many faults in all. Every kind of round comes early, then they come at random."""
    made: dict[str, Callable[[], list[Fault]]] = {
        "one rail": lambda: [_one(dice, rails, "down")],
        "both ends": lambda: _both_ends(dice, rails),
        "silence one way": lambda: [_one(dice, rails, "silent")],
        "silence both ways": lambda: _both_silent(dice, rails),
        "a second fault during the failover": lambda: _second(dice, rails),
        "all rails": lambda: _all_rails(dice, rails),
        "slow": lambda: [_one(dice, rails, "slow"), _one(dice, rails, "down", at_ms=dice.choice([0, 30, 200]))],
        "freeze": lambda: _freeze(dice, rails),
        "overlap": lambda: _overlap(dice, rails),
        "cycles": lambda: _cycles(dice, rails),
    }
    if corrupt:
        made["corrupt"] = lambda: [
            _one(dice, rails, "corrupt"),
            _one(dice, rails, "down", at_ms=dice.choice([50, 150])),
        ]
    weights = {"one rail": 6, "a second fault during the failover": 5, "overlap": 4}
    rounds: list[Round] = []
    first = [what for what in made if what != "cycles"]
    dice.shuffle(first)
    if faults >= 2 * CYCLES:
        first.insert(dice.randrange(len(first)), "cycles")
    usual = [what for what in made for _ in range(weights.get(what, 2)) if what != "cycles"]
    while sum(len(r.faults) for r in rounds) < faults:
        rare = "cycles" if dice.random() < 0.01 else dice.choice(usual)
        what = first.pop() if first else rare
        rounds.append(Round(what, made[what](), dice.choice([0, 0, 20, 60, 150, 300])))
    return rounds


def _one(dice: random.Random, rails: int, kind: str, at_ms: int = 0) -> Fault:
    for_ms = dice.choice([200, 300, 500] if kind in {"silent", "slow", "corrupt"} else [1, 10, 40, 100, 250])
    mbit = dice.choice([20, 100, 400]) if kind == "slow" else 0
    return Fault(kind, at_ms, for_ms, dice.randrange(2), dice.randrange(rails), mbit)


def _both_ends(dice: random.Random, rails: int) -> list[Fault]:
    rail = dice.randrange(rails)
    return [Fault("down", dice.randrange(40), dice.choice([20, 80, 200]), node, rail) for node in (0, 1)]


def _both_silent(dice: random.Random, rails: int) -> list[Fault]:
    rail, for_ms = dice.randrange(rails), dice.choice([40, 200, 400])
    return [Fault("silent", 0, for_ms, node, rail) for node in (0, 1)]


def _second(dice: random.Random, rails: int) -> list[Fault]:
    """The rail that takes over goes within 30 ms, while the resume is on its way; now and then the first comes back."""
    first, second = dice.sample(range(rails), 2)
    kind = dice.choice(["down", "down", "silent"])
    return [
        Fault("down", 0, dice.choice([5, 15, 60, 250]), dice.randrange(2), first),
        Fault(kind, dice.randrange(31), dice.choice([10, 60, 250]), dice.randrange(2), second),
    ]


def _all_rails(dice: random.Random, rails: int) -> list[Fault]:
    return [
        Fault("down", dice.randrange(60), dice.choice([100, 300, 600]), dice.randrange(2), rail)
        for rail in range(rails)
    ]


def _freeze(dice: random.Random, rails: int) -> list[Fault]:
    frozen = Fault("freeze", 0, FREEZE_MS, dice.randrange(2), 0)
    return [frozen, _one(dice, rails, "down", at_ms=dice.choice([0, 100, 190]))] if dice.random() < 0.5 else [frozen]


def _overlap(dice: random.Random, rails: int) -> list[Fault]:
    """Any two to four of the quick kinds at any time, each at most once at a place."""
    places = [(kind, node, rail) for kind in ("down", "silent") for node in (0, 1) for rail in range(rails)]
    return [
        Fault(kind, dice.randrange(200), dice.choice([5, 30, 100, 300]), node, rail)
        for kind, node, rail in dice.sample(places, dice.randrange(2, 5))
    ]


def _cycles(dice: random.Random, rails: int) -> list[Fault]:
    """The same rail again and again, sometimes with time to come back and sometimes without."""
    node, rail = dice.randrange(2), dice.randrange(rails)
    out, at = [], 0
    for _ in range(CYCLES):
        out.append(Fault("down", at, dice.choice([5, 20, 50]), node, rail))
        at = out[-1].at_ms + out[-1].for_ms + dice.choice([5, 30, 150])
    return out


def network_sockets(pid: int) -> list[str]:
    """The lines of all TCP and UDP sockets in the process's namespace but those in TIME_WAIT, which are nobody's."""
    lines: list[str] = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        lines += [
            f"{table} {row[1]} {row[2]} state {row[3]}" for row in rows if row[3] != "06" or table.startswith("udp")
        ]
    return lines


def resources(pid: int) -> dict[str, Any]:
    """Open files, threads, and resident memory in bytes."""
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }
