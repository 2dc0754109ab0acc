"""Facts about where we are: network namespace and privileges."""

from __future__ import annotations

import os
from pathlib import Path

CAP_NET_ADMIN = 12  # capabilities(7), linux/capability.h


def namespace_inode() -> int:
    """Number of this thread's network namespace; 0 if the kernel does not say. Unique while the namespace lives."""
    try:
        return os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        return 0


def may_change_network() -> bool:
    """True if this process may set links up and down in its namespace (CAP_NET_ADMIN in its user namespace)."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> CAP_NET_ADMIN & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False
