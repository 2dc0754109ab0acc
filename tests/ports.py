"""TCP ports for what is started later, which no other test and no outgoing connection takes meanwhile."""

from __future__ import annotations

import errno
import os
import socket
from itertools import count

# Below the ports that Linux gives to outgoing connections (net.ipv4.ip_local_port_range: from 32768).
FIRST, COUNT = 20_000, 12_000
_turn = count(os.getpid() * 97)
_claims: list[socket.socket] = []


def claim_port() -> int:
    """A port of 127.0.0.1 that is this process's until it ends: other test processes claim others. A port that is
    only probed (bound to 0 and closed) may be anybody's by the time that it is used."""
    for _ in range(COUNT):
        port = FIRST + next(_turn) % COUNT
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0ftctl-test-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        _claims.append(claim)
        return port
    raise AssertionError(f"no free port from {FIRST} to {FIRST + COUNT - 1}")
