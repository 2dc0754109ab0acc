"""Where the replicas are: each in a network namespace of its own with two rails, or, where that cannot be, all on
loopback. What is not a replica (coordinator, lighthouse) is on the switch, as on a machine that does not fail."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import TracebackType

from ftar_core.bench.network import Network
from ftar_core.bench.report import BenchError

RAILS = 2
HOST = "10.79.0.254"


class Place:
    """`with Place(4) as place`. `why`: why it is loopback, where no node can be lost; None: it is namespaces."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._network: Network | None = None
        self._stack = ExitStack()
        self.why: str | None = None
        self.host = "127.0.0.1"

    def __enter__(self) -> Place:
        try:
            self._network = self._stack.enter_context(Network((0,) * RAILS, self._nodes))
            self._network.join(HOST)
            self.host = HOST
        except BenchError as error:
            self.why = str(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def address(self, node: int) -> str:
        return self._network.addresses[node][0] if self._network is not None else "127.0.0.1"

    def device(self) -> str:
        return self._network.devices[0] if self._network is not None else ""

    def rails(self, node: int) -> str:
        """As FTAR_RAILS wants them."""
        if self._network is None:
            return f"a=127.0.{10 + node}.1,b=127.0.{10 + node}.2"
        pairs = zip(self._network.devices, self._network.addresses[node], strict=True)
        return ",".join(f"{device}={address}@{device}" for device, address in pairs)

    def handle(self, node: int) -> int | None:
        return self._network.handle(node) if self._network is not None else None

    def reachable(self, node: int, yes: bool) -> None:
        """All rails of the node carry its frames, or swallow them while everybody has carrier."""
        if self._network is None:
            raise BenchError("on loopback no node can be lost")
        for rail in range(RAILS):
            self._network.forward(node, rail, yes)

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            return int(probe.getsockname()[1])
