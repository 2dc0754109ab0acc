"""The status sockets of the processes on this node that have links: finding them, and reading all of them at once.

They are abstract Unix sockets of our network namespace (ftar_core/wire/linkstatus.py), so /proc/net/unix lists them
while their processes live, and nobody has to register. Who is at the other end is the kernel's word (SO_PEERCRED), not
the document's. All are read side by side under one deadline: a process that is stopped accepts connections (its kernel
does) and says nothing, and must not hold up the others.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.host.errors import HostError
from ftar_core.wire.linkstatus import MAX_BYTES, pid_in

TABLE = "/proc/thread-self/net/unix"
MAX_TABLE_BYTES = 64 * 2**20
MAX_SOCKETS = 256
MAX_TOTAL_BYTES = 64 * 2**20  # of one look: strangers may have such sockets too
LISTENS = 0x10000  # __SO_ACCEPTCON in the table's flags
_UCRED = struct.Struct("=iII")


@dataclass(frozen=True)
class LinkSocket:
    """`inode` is the socket's own: another process with the same number has another one."""

    inode: int
    name: str  # as in the table: @ftar-links/PID/N


@dataclass(frozen=True)
class LinkAnswer:
    """`data` or `problem`. `pid` is 0 if the process cannot be seen from our pid namespace; -1, nobody was reached."""

    socket: LinkSocket
    pid: int
    uid: int
    data: bytes = b""
    problem: str = ""


def find() -> list[LinkSocket]:
    """Listening status sockets, at most MAX_SOCKETS. Raises HostError."""
    try:
        with open(TABLE, "rb") as file:
            table = file.read(MAX_TABLE_BYTES)
    except OSError as error:
        raise HostError(f"{TABLE}: {error.strerror}") from None
    found = []
    for line in table.splitlines():
        # Num       RefCount Protocol Flags    Type St Inode Path
        # ffff8a9c: 00000002 00000000 00010000 0001 01 61729 @ftar-links/7/0
        parts = line.split()
        if len(parts) != 8 or not parts[7].startswith(b"@ftar-links/") or not int(parts[3], 16) & LISTENS:
            continue
        name = parts[7].decode("ascii", "replace")
        if pid_in(name) is not None:
            found.append(LinkSocket(int(parts[6]), name))
    return sorted(found, key=lambda one: one.inode)[:MAX_SOCKETS]


@dataclass
class _Reading:
    of: LinkSocket
    sock: socket.socket
    pid: int
    uid: int
    data: bytearray = field(default_factory=bytearray)


def read_all(sockets: Sequence[LinkSocket], deadline_s: float) -> list[LinkAnswer]:
    """What each of them says, in their order. Never longer than the deadline."""
    answers: dict[LinkSocket, LinkAnswer] = {}
    until = time.monotonic() + deadline_s
    total = 0
    with selectors.DefaultSelector() as selector:
        for of in sockets:
            reading = _open(of)
            if isinstance(reading, LinkAnswer):
                answers[of] = reading
            else:
                selector.register(reading.sock, selectors.EVENT_READ, reading)
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                reading = key.data
                before = len(reading.data)
                answer = _read(reading)
                total += len(reading.data) - before
                if answer is None and total > MAX_TOTAL_BYTES:
                    answer = LinkAnswer(reading.of, reading.pid, reading.uid, problem="all together say too much")
                if answer is not None:
                    selector.unregister(reading.sock)
                    reading.sock.close()
                    answers[reading.of] = answer
        for key in list(selector.get_map().values()):
            reading = key.data
            reading.sock.close()
            problem = f"no answer within {deadline_s:g} s"
            answers[reading.of] = LinkAnswer(reading.of, reading.pid, reading.uid, problem=problem)
    return [answers[of] for of in sockets]


def _open(of: LinkSocket) -> _Reading | LinkAnswer:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect("\0" + of.name[1:])
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError as error:
        sock.close()
        words = {errno.EAGAIN: "its queue of connections is full", errno.ECONNREFUSED: "it has just closed its socket"}
        return LinkAnswer(of, -1, -1, problem=words.get(error.errno or 0, error.strerror or str(error)))
    if os.geteuid() != 0 and uid not in (os.geteuid(), 0):
        sock.close()
        return LinkAnswer(of, pid, uid, problem=f"of user {uid}, whom this agent does not believe")
    return _Reading(of, sock, pid, uid)


def _read(reading: _Reading) -> LinkAnswer | None:
    """None: there is more to come."""
    try:
        while True:
            chunk = reading.sock.recv(1 << 18)
            if not chunk and not reading.data.endswith(b"}\n"):
                return LinkAnswer(reading.of, reading.pid, reading.uid, problem="its answer ended early")
            if not chunk:
                return LinkAnswer(reading.of, reading.pid, reading.uid, data=bytes(reading.data))
            reading.data += chunk
            if len(reading.data) > MAX_BYTES:
                reading.data = bytearray(MAX_BYTES)
                return LinkAnswer(reading.of, reading.pid, reading.uid, problem=f"says more than {MAX_BYTES} bytes")
    except BlockingIOError:
        return None
    except OSError as error:
        return LinkAnswer(reading.of, reading.pid, reading.uid, problem=error.strerror or str(error))


def lives(pid: int) -> bool:
    """False for a process that has ended, also when nobody has waited for it yet (proc_pid_stat(5), field 3)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False
