"""Ranks on their leader's node speak with it over a Unix socket: no acknowledgements, timers or soft interrupts.

Beside its TCP port a leader listens at an abstract name (unix(7)) that is made of the address it publishes, so whoever
knows the one knows the other. Such names belong to a network namespace. Where a rank shares that with its leader the
name is there, whatever either sees of the file system; on another node, or in a container with a network of its own, it
is not, and the kernel says so at once. The name is gone with the leader, however that ends: no file can be left behind.

Any user may take an abstract name, so the kernel is asked who is at the other end (SO_PEERCRED): this user, or root. An
impostor could otherwise stand between a rank and its leader and pass on the proofs of the token. All that holds over
TCP holds here too; what goes wrong here is a reason to use TCP, not one to fail.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import struct
import sys

from ftar_core.wire.address import Address

log = logging.getLogger("ftar.team")

_UCRED = struct.Struct("iII")  # pid, uid, gid
_NOBODY = 65534  # how a user looks who is unknown in this user namespace (user_namespaces(7)): anybody


def name_of(address: Address) -> str:
    """The abstract name beside this address: hosts are of any length, names of 107 bytes at most."""
    return f"\0ftar-leader/{address.port}/{hashlib.sha256(address.host.encode()).hexdigest()[:16]}"


def listen_near(address: Address, backlog: int) -> socket.socket | None:
    """For the ranks of this node. None: all will use TCP."""
    if sys.platform != "linux":
        return None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        log.info("no Unix socket for the ranks of this node, they use TCP: %s", error.strerror or error)
        return None
    try:
        sock.bind(name_of(address))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        log.info("no Unix socket for the ranks of this node, they use TCP: %s", error.strerror or error)
        return None
    return sock


def dial_near(address: Address) -> socket.socket | None:
    """A non-blocking connection to the leader that publishes this address. None: not on this node, not of this user, or
    busy; then TCP is the way. Never waits."""
    if sys.platform != "linux":
        return None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        sock.setblocking(False)
        sock.connect(name_of(address))  # with a full backlog EAGAIN, not EINPROGRESS
    except OSError as error:
        sock.close()
        if error.errno != errno.ECONNREFUSED:
            log.info("the leader's Unix socket is not used: %s", error.strerror or error)
        return None
    if not trusted(sock):
        sock.close()
        log.warning("another user listens at the name of the leader's Unix socket: TCP is used")
        return None
    return sock


def is_near(sock: socket.socket) -> bool:
    return sock.family == socket.AF_UNIX


def trusted(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user or of root. Over TCP nobody can tell: true."""
    if not is_near(sock):
        return True
    try:
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError:
        return False
    return bool(uid == 0 or (uid == os.geteuid() and uid != _NOBODY))
