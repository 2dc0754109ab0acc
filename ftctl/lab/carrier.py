"""Watches a device's carrier from inside a node's network: `python -m ftctl.lab.carrier KEEPER_PID FD DEVICE`.

An independent witness for the demo: it prints "up TIME" or "down TIME" (CLOCK_MONOTONIC seconds) at the start and at
every change, so that how long the product took to notice is not measured by the product. It asks the kernel every half
millisecond (ETHTOOL_GLINK, 3 us a call), because link events of netlink may be held back for up to a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import sys
import time

from ftctl.lab.namespaces import enter

SIOCETHTOOL = 0x8946
ETHTOOL_GLINK = 0x0000000A
POLL_S = 0.0005


def carrier(control: socket.socket, device: str) -> bool:
    """True if the device is up and has carrier. Raises OSError."""
    value = ctypes.create_string_buffer(struct.pack("=II", ETHTOOL_GLINK, 0))
    request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
    fcntl.ioctl(control.fileno(), SIOCETHTOOL, request)
    return bool(struct.unpack("=II", value.raw[:8])[1])


def main(argv: list[str]) -> int:
    keeper, fd, device = int(argv[1]), int(argv[2]), argv[3]
    enter(keeper, fd)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        before: bool | None = None
        while True:
            now = carrier(control, device)
            if now != before:
                print("up" if now else "down", time.monotonic(), flush=True)
                before = now
            time.sleep(POLL_S)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
    except OSError as error:
        sys.exit(f"carrier watch: {error}")
