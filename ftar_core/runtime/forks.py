"""What a forked child (a data loader's worker) must not keep: the sockets of this process.

The kernel tells the other side that a process is dead by closing its connections, and it does not while a child still
has them. So the child closes them before anything else runs in it; the parent's stay as they are. (The rails' sockets
belong to the native core, which does the same.)
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_in_children(sock: socket.socket) -> None:
    """From now on, until it is closed here."""
    _sockets.add(sock)


def _close_all() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
