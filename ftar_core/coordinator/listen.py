"""The coordinator's two sockets: TCP and UDP on one address and one port number."""

from __future__ import annotations

import errno
import socket

from ftar_core.errors import SettingsError
from ftar_core.wire.address import Address

BACKLOG = 4096
# Heartbeats of a thousand members for a second: a slow fsync must not cost one.
UDP_BUFFER_BYTES = 1024 * 1024
_TRIES = 20  # port 0: the kernel's choice for TCP may be taken for UDP


def listen(address: Address) -> tuple[socket.socket, socket.socket]:
    """(TCP, listening; UDP, bound). Comes before the claim of the store: a coordinator that cannot have its port must
    not end the one that has it; who connects meanwhile waits in the backlog. Port 0: the kernel chooses. Raises
    SettingsError."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _wrong(address, f"the host cannot be resolved: {error}") from None
    family, _, _, _, target = found[0]
    for attempt in range(_TRIES):
        tcp = socket.socket(family, socket.SOCK_STREAM)
        udp = socket.socket(family, socket.SOCK_DGRAM)
        try:
            tcp.setblocking(False)
            udp.setblocking(False)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UDP_BUFFER_BYTES)
            tcp.bind(target)
            tcp.listen(BACKLOG)
            udp.bind((target[0], tcp.getsockname()[1], *target[2:]))
        except OSError as error:
            tcp.close()
            udp.close()
            if error.errno == errno.EADDRINUSE and address.port == 0 and attempt < _TRIES - 1:
                continue
            raise _wrong(address, str(error.strerror)) from None
        return tcp, udp
    raise _wrong(address, "no free port")


def _wrong(address: Address, reason: str) -> SettingsError:
    return SettingsError(
        f"--listen {address}: {reason}",
        hint=f"choose another --listen HOST:PORT, or see who has it: ss -tulnp sport = :{address.port}",
    )
