"""HOST:PORT as users write it, in one place: IPv4, names, and IPv6 in brackets (RFC 3986, section 3.2.2)."""

from __future__ import annotations

from typing import NamedTuple

COORDINATOR_PORT = 7600


class Address(NamedTuple):
    """A host (name or number, IPv6 without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, any_port: bool = False) -> Address:
    """`HOST:PORT` or `[IPV6]:PORT`. Raises ValueError with the reason.

    `any_port` allows port 0 (the kernel chooses; for listening).
    """
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise ValueError(f"{text!r}: [IPV6]:PORT is expected")
        port_text = rest[1:]
    else:
        host, colon, port_text = text.rpartition(":")
        if not colon:
            raise ValueError(f"{text!r}: HOST:PORT is expected, for example 10.0.0.1:{COORDINATOR_PORT}")
        if ":" in host:
            raise ValueError(f"{text!r}: an IPv6 address needs brackets, as in [{host}]:{port_text}")
    if not host:
        raise ValueError(f"{text!r}: the host is missing before the port")
    if any(character.isspace() for character in host):
        raise ValueError(f"{text!r}: a space in the host name")
    lowest = 0 if any_port else 1
    if not (port_text.isascii() and port_text.isdigit()) or not lowest <= int(port_text) <= 65535:
        raise ValueError(f"{text!r}: the port is {port_text!r}, a number from {lowest} to 65535 is expected")
    return Address(host, int(port_text))
