"""argv: a command. It runs in a process that gets no news from netlink, as in a strict container.

A filter of system calls (seccomp(2)) refuses sockets of AF_NETLINK that do not block, which is how the plugin asks for
news. The C library's own question for addresses uses one that blocks, and stays possible.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: ld [k], jeq, jset, ret
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
SYS_SOCKET = {"x86_64": 41, "aarch64": 198}
NUMBER, DOMAIN, KIND = 0, 16, 24  # offsets in struct seccomp_data: the call, its first and its second argument


def program(sys_socket: int, error: int) -> bytes:
    steps = [
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 5, sys_socket),
        (LOAD, 0, 0, DOMAIN),
        (EQUAL, 0, 3, socket.AF_NETLINK),
        (LOAD, 0, 0, KIND),
        (ANY_BIT, 0, 1, socket.SOCK_NONBLOCK),
        (RETURN, 0, 0, REFUSE | error),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def main() -> None:
    steps = ctypes.create_string_buffer(code := program(SYS_SOCKET[platform.machine()], 97), len(code))  # EAFNOSUPPORT
    about = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, about, 0, 0)):
        if libc.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    except OSError:
        os.execvp(sys.argv[1], sys.argv[1:])
    raise SystemExit("the filter does not work")


if __name__ == "__main__":
    main()
