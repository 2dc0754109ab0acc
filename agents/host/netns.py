"""Facts about where we are: network namespace and privileges."""

from __future__ import annotations

import os

from agents.host.capabilities import CAP_NET_ADMIN, effective


def namespace_inode() -> int:
    """Number of this thread's network namespace; 0 if the kernel does not say. Unique while the namespace lives."""
    try:
        return os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        return 0


def may_change_network() -> bool:
    """True if this process may set links up and down in its namespace (CAP_NET_ADMIN in its user namespace)."""
    return CAP_NET_ADMIN in effective()
