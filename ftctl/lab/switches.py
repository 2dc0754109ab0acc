"""Makes the lab's switches notice the carrier of their ports as soon as hardware would.

The kernel tells a bridge of a port's carrier up to a second late when there is much of that news, as after a few faults
in a row (net/core/link_watch.c). A question for the carrier (ETHTOOL_GLINK, 3 us a call) brings the news at once, on
kernels from 6.8 on; so the keeper, which is at home in the fabric, asks again and again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from ftctl.lab.carrier import carrier

LOOK_S = 0.02  # how late a switch may be


class Switches:
    """The ports of the network that this thread is in when it is made. Raises OSError: no socket."""

    def __init__(self, ports: Sequence[str]) -> None:
        self._ports = ports
        self._control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def look(self) -> None:
        for port in self._ports:
            with suppress(OSError):  # a port that somebody removed
                carrier(self._control, port)

    def close(self) -> None:
        self._control.close()
