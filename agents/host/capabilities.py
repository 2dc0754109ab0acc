"""Capabilities of this process (capabilities(7)): which it has, and giving up all but a few for good.

They belong to threads: what is given up here is given up by the calling thread, and by the threads and programs that it
starts afterwards. So it is done before there are any.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from agents.host.errors import HostError

# linux/capability.h
CAP_KILL, CAP_SETPCAP, CAP_NET_ADMIN = 5, 8, 12
NAMES = {CAP_KILL: "CAP_KILL", CAP_SETPCAP: "CAP_SETPCAP", CAP_NET_ADMIN: "CAP_NET_ADMIN"}
_VERSION_3 = 0x20080522
# linux/prctl.h
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 23, 24, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR_ALL = 2, 4


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Half(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def effective() -> frozenset[int]:
    """Of this thread; empty where the kernel does not say."""
    return _set("CapEff")


def words(found: Iterable[int]) -> str:
    return " ".join(NAMES.get(one, f"capability {one}") for one in sorted(found)) or "none"


def keep_only(wanted: frozenset[int]) -> frozenset[int]:
    """Give up all capabilities but `wanted`, here and in every program started from here (bounding set, no-new-privs).

    Returns those that are left: `wanted` as far as this process had them. Raises HostError; then some may be gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    had = _set("CapPrm")
    left = wanted & had
    if CAP_SETPCAP in had:  # without it the bounding set stays; no-new-privs keeps programs from gaining by it
        number = 0
        while libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
            if number not in left:
                _done(libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), "limit the capabilities of programs")
            number += 1
    _done(libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0), "clear ambient capabilities")
    halves = (_Half * 2)()
    for number in left:
        half, bit = halves[number // 32], 1 << number % 32
        half.effective |= bit
        half.permitted |= bit
        half.inheritable |= bit
    header = _Header(_VERSION_3, 0)
    _done(libc.capset(ctypes.byref(header), ctypes.byref(halves)), "give capabilities up")
    for number in left:  # so that nft has them too where the user is not root
        _done(libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, number, 0, 0), "pass capabilities on to programs")
    _done(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "forbid new privileges")
    return left


def _set(field: str) -> frozenset[int]:
    try:
        for line in Path("/proc/thread-self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(field + ":"):
                bits = int(line.split()[1], 16)
                return frozenset(number for number in range(64) if bits >> number & 1)
    except (OSError, ValueError, IndexError):
        pass
    return frozenset()


def _done(result: int, operation: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise HostError(operation, number, os.strerror(number))
