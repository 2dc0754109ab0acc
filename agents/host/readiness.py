"""Tells a service manager that started this process that it does its work now (sd_notify(3), systemd's Type=notify)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


class Readiness:
    """To be made before any other process is started: they are not to speak for this one."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")

    def tell(self) -> None:
        """Nobody listens: nothing is done."""
        if not self._address.startswith(("/", "@")):
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.sendto(b"READY=1", address)
