"""Unix stream sockets between processes of one user on one node.

Who is at the other end is not asked but known: the kernel names the peer's process and user (SO_PEERCRED, unix(7)). The
socket's mode is set before it listens, so that there is no moment at which others could connect.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UCRED = struct.Struct("=iII")
PATH_LIMIT = 107  # sun_path, unix(7)


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected. pid is 0 if it cannot be seen from this pid namespace."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


@contextmanager
def named(path: Path) -> Iterator[str]:
    """A name for `path` that fits into a socket address, however long it is: through a descriptor of its directory."""
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen_unix(path: Path, *, backlog: int) -> socket.socket:
    """Listen on `path` with mode 0600, in a directory made with 0700 if it is not there. Non-blocking.

    A socket that nobody listens on is left over from a killed process and replaced. Raises OSError: EADDRINUSE if
    somebody does listen, EEXIST if something else than a socket is there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with named(path) as name:
            _clear(path, name)
            sock.bind(name)
        os.chmod(path, 0o600)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _clear(path: Path, name: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "something that is not a socket is in the way", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # a full backlog, or no right to connect: somebody is there
    raise OSError(errno.EADDRINUSE, "another process listens there", str(path))
