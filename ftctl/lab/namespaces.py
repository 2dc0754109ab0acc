"""Network namespaces held by open files alone: no name in /run/netns, no mount, nothing that outlives its last holder.

`unshare` and `setns` come from the C library because Python has them only since 3.12. Both act on the calling thread;
the processes that use this module have one thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(Exception):
    """The kernel refuses a namespace or a device in it. `hint` names the setting or package."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """setns(2). Raises OSError."""
    _checked(_libc.setns(fd, kind), "setns")


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, so that none is left as a zombie (prctl(2))."""
    _checked(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def _refusal_hint() -> str:
    """Which setting stands in the way of a user namespace."""
    checks = (
        ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    )
    for path, bad, command in checks:
        try:
            if Path(path).read_text().strip() == bad:
                return f"{command}, or run as root"
        except OSError:
            continue
    if os.geteuid() == 0:
        return "this root has no capabilities: give the container CAP_SYS_ADMIN and CAP_NET_ADMIN"
    return "run as root, or outside a container that forbids user namespaces"


def become_root_of_user_namespace() -> None:
    """A new user namespace in which this user is root (user_namespaces(7)). Raises NamespaceError: what forbids it."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise NamespaceError(
            f"this machine gives no user namespace to uid {uid}: {error.strerror}", _refusal_hint()
        ) from None


def gain_power() -> None:
    """Be able to make network namespaces: as root already, or else as the root of a user namespace.

    Tried, not judged by the uid: root in a container may lack CAP_SYS_ADMIN. Raises NamespaceError.
    """
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        become_root_of_user_namespace()
    except OSError as error:
        raise NamespaceError(f"no new network namespace: {error.strerror}", "the kernel needs CONFIG_NET_NS") from None


def new_network() -> int:
    """A fresh network namespace; this thread moves into it. Returns its file descriptor. Raises NamespaceError."""
    try:
        unshare(CLONE_NEWNET)
    except OSError as error:
        hint = (
            "run as root"
            if error.errno == errno.EPERM
            else "the kernel needs CONFIG_NET_NS and user.max_net_namespaces > 0"
        )
        raise NamespaceError(f"no new network namespace: {error.strerror}", hint) from None
    return current_network()


def current_network() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(fd: int) -> Iterator[None]:
    """This thread is in the network namespace `fd`; then back in its own."""
    home = current_network()
    try:
        setns(fd, CLONE_NEWNET)
        yield
    finally:
        setns(home, CLONE_NEWNET)
        os.close(home)


def enter(keeper_pid: int, fd: int) -> None:
    """Join a namespace that another process holds as its file descriptor `fd`, and that process's user namespace.

    Raises OSError: no such process, or it belongs to somebody else.
    """
    net = os.open(f"/proc/{keeper_pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        theirs, ours = (os.stat(f"/proc/{who}/ns/user").st_ino for who in (keeper_pid, "self"))
        if theirs != ours:
            user = os.open(f"/proc/{keeper_pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            try:
                setns(user, CLONE_NEWUSER)
            finally:
                os.close(user)
        setns(net, CLONE_NEWNET)
    finally:
        os.close(net)
