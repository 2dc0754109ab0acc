"""What a forked child (a data loader's worker) must not keep: the sockets and file locks of this process.

The kernel tells the other side that a process is dead by closing its connections, and it does not while a child still
has them; a lock of a file is given back no sooner. So the child closes them before anything else runs in it; the
parent's stay as they are. (The rails' sockets belong to the native core, which does the same.)
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Protocol


class Closing(Protocol):
    def close(self) -> None: ...


_closing: weakref.WeakSet[Closing] = weakref.WeakSet()


def not_in_children(sock: socket.socket) -> None:
    """From now on, until it is closed here."""
    _closing.add(sock)


def close_in_children(held: Closing) -> None:
    """The same for whatever else holds a descriptor."""
    _closing.add(held)


def _close_all() -> None:
    for held in list(_closing):
        held.close()
    _closing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
