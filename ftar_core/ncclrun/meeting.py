"""How the ranks find each other: handles over TCP at rank 0, as over NCCL's bootstrap.

The connections stay, because one that closes says that a rank is gone.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MEET_S = 120.0  # for all ranks to come; a node may be starting still
HELLO_S = 5.0
MAX_LINE = 1 << 20
MAX_WORLD = 64

Handles = dict[str, str]  # "FROM>TO/CHANNEL" -> the receiver's handle in hex


class PeerGone(Exception):
    """A rank has ended or cannot be reached; the message says which and how."""


@dataclass
class Wire:
    """Lines of JSON over one TCP connection."""

    sock: socket.socket
    rest: bytearray = field(default_factory=bytearray)

    def send(self, message: Mapping[str, Any]) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Raises ValueError for anything but a JSON object a line; OSError."""
        while b"\n" not in self.rest:
            chunk = self.sock.recv(65536)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            self.rest += chunk
            if len(self.rest) > MAX_LINE:
                raise ValueError("a line without an end")
        line, _, self.rest = self.rest.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message


@dataclass(frozen=True)
class Place:
    """Who this rank is, and where rank 0 listens."""

    rank: int
    world: int
    address: str
    port: int


def meet(place: Place, mine: Handles, ended: Callable[[], bool]) -> tuple[Handles, list[Wire]]:
    """Everybody's handles, and the connections that close when somebody ends. Raises PeerGone."""
    return _host(place, mine, ended) if place.rank == 0 else _join(place, mine, ended)


def _host(place: Place, mine: Handles, ended: Callable[[], bool]) -> tuple[Handles, list[Wire]]:
    deadline = time.monotonic() + MEET_S
    present: dict[int, Wire] = {}
    handles = dict(mine)
    with socket.create_server((place.address, place.port), backlog=MAX_WORLD) as listener:
        listener.settimeout(0.2)
        while len(present) < place.world - 1:
            if ended():
                raise PeerGone("ended while waiting for the others")
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, place.world)) - set(present))
                raise PeerGone(f"ranks {missing} did not come within {MEET_S:.0f} s")
            with suppress(TimeoutError):
                sock, _ = listener.accept()
                sock.settimeout(HELLO_S)
                wire = Wire(sock)
                rank, theirs = _hello(wire, place)
                if rank is None:
                    sock.close()  # a stranger, or a rank of another job
                    continue
                if rank in present:
                    present[rank].sock.close()  # it was started again meanwhile
                present[rank] = wire
                handles.update(theirs)
    for rank, wire in present.items():
        try:
            wire.send({"handles": handles})
        except OSError as error:
            raise PeerGone(f"rank {rank} left while all met: {error.strerror}") from None
    return handles, list(present.values())


def _hello(wire: Wire, place: Place) -> tuple[int | None, Handles]:
    try:
        said = wire.receive()
        rank, world, handles = said["rank"], said["world"], said["handles"]
        usable = isinstance(rank, int) and 0 < rank < place.world and world == place.world
        if usable and all(isinstance(k, str) and isinstance(v, str) for k, v in handles.items()):
            return rank, handles
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    return None, {}


def _join(place: Place, mine: Handles, ended: Callable[[], bool]) -> tuple[Handles, list[Wire]]:
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            sock = socket.create_connection((place.address, place.port), timeout=HELLO_S)
            break
        except OSError as error:
            if ended() or time.monotonic() > deadline:
                where = f"{place.address}:{place.port}"
                raise PeerGone(f"rank 0 cannot be reached at {where}: {error.strerror or error}") from None
            time.sleep(0.1)
    wire = Wire(sock)
    try:
        wire.send({"rank": place.rank, "world": place.world, "handles": mine})
        sock.settimeout(max(1.0, deadline - time.monotonic()))
        handles = wire.receive()["handles"]
        sock.settimeout(HELLO_S)
        return {str(name): str(handle) for name, handle in handles.items()}, [wire]
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        sock.close()
        raise PeerGone(f"rank 0 did not answer: {error}") from None
