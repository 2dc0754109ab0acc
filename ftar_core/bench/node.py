"""One end of a benchmark: `python -m ftar_core.bench.node JSON`, a process that drives the plugin or bare sockets as
it is told by JSON lines on stdin, and answers each with one on stdout. Started by nodes.py, in the place it measures.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import msgspec

from ftar_core.bench import _native
from ftar_core.bench.serving import serve
from ftar_core.ncclenv import plugin_path

PATIENCE_S = 60.0


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    parent: int  # process id of the benchmark: this process ends with it
    abi: int  # version of the plugin's interface; 0: bare sockets only


class Session:
    def __init__(self, plan: Plan) -> None:
        self.plugin = _native.Plugin(str(plugin_path()), plan.abi) if plan.abi else None
        self.channels: dict[int, _native.Channel] = {}
        self.listeners: dict[int, socket.socket] = {}
        self.traffic: _native.Traffic | None = None
        self.last = 0

    def keep(self, channel: _native.Channel) -> int:
        self.last += 1
        self.channels[self.last] = channel
        return self.last

    def _plugin(self) -> _native.Plugin:
        if self.plugin is None:
            raise RuntimeError("this process has bare sockets only")
        return self.plugin

    def listen(self, device: int) -> list[Any]:
        listener, handle = self._plugin().listen(device)
        return [listener, handle.hex()]

    def connect(self, device: int, handle: str) -> int:
        plugin, raw = self._plugin(), bytes.fromhex(handle)
        return self.keep(_until(lambda: plugin.try_connect(device, raw), "connect"))

    def accept(self, listener: int) -> int:
        plugin = self._plugin()
        channel = _until(lambda: plugin.try_accept(listener), "accept")
        plugin.close_listen(listener)
        return self.keep(channel)

    def listen_bare(self, address: str) -> list[int]:
        listener = socket.create_server((address, 0), backlog=1)
        listener.settimeout(PATIENCE_S)
        self.listeners[listener.fileno()] = listener
        return [listener.fileno(), listener.getsockname()[1]]

    def connect_bare(self, here: str, address: str, port: int, congestion: str) -> int:
        end = socket.create_connection((address, port), PATIENCE_S, source_address=(here, 0))
        return self._bare(end, congestion)

    def accept_bare(self, listener: int, congestion: str) -> int:
        server = self.listeners.pop(listener)
        end, _ = server.accept()
        server.close()
        return self._bare(end, congestion)

    def _bare(self, end: socket.socket, congestion: str) -> int:
        # As the plugin's own data sockets: a host's default may waste a short fat link.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        return self.keep(_native.socket_channel(end.detach()))

    def close(self, channel: int) -> None:
        self.channels.pop(channel).close()

    def send(self, channel: int, size: int, count: int, window: int) -> tuple[int, int]:
        return _native.send_many(self.channels[channel], size, count, window, PATIENCE_S)

    def receive(self, channel: int, size: int, count: int, window: int) -> tuple[int, int]:
        return _native.receive_many(self.channels[channel], size, count, window, PATIENCE_S)

    def ping_pong(self, out: int, into: int, size: int, count: int, first: bool) -> tuple[int, int]:
        return _native.ping_pong(self.channels[out], self.channels[into], size, count, first, PATIENCE_S)

    def stream(self, channel: int, sender: bool, number: int, sizes: list[int], window: int) -> None:
        if self.traffic is None:
            self.traffic = _native.Traffic()
        self.traffic.add(self.channels[channel], sender, number, sizes, window)

    def _traffic(self) -> _native.Traffic:
        if self.traffic is None:
            raise RuntimeError("no stream was added")
        return self.traffic

    def start(self) -> None:
        self._traffic().start()

    def pause(self, on: bool) -> None:
        self._traffic().pause(on)

    def state(self) -> list[Any]:
        """[error, streams]"""
        traffic = self._traffic()
        return [traffic.error(), traffic.state()]

    def gaps(self) -> list[tuple[int, int, int]]:
        return self._traffic().gaps()

    def record(self, from_ns: int, bin_ns: int, bins: int) -> None:
        self._traffic().record(from_ns, bin_ns, bins)

    def recorded(self) -> list[int]:
        return self._traffic().recorded()

    def log(self) -> list[tuple[int, int, str]]:
        return _native.Plugin.log()

    def unsettled(self) -> list[str]:
        """Rails of connections that are not UP, and connections whose traffic is not on the rail they prefer: from the
        document that every process with links serves to operators."""
        with socket.socket(socket.AF_UNIX) as status:
            status.settimeout(PATIENCE_S)
            status.connect(f"\0ftar-links/{os.getpid()}/0")
            document = b""
            while more := status.recv(1 << 16):
                document += more
        found = []
        for link in json.loads(document)["links"]:
            states = [rail["state"] for rail in link["rails"]]
            if set(states) != {"UP"} or not link["rails"][0]["active"]:
                found.append(f"connection {link['id']} ({link['direction']}): {', '.join(states)}")
        return found

    def end(self) -> None:
        """Close everything in good order."""
        if self.traffic is not None:
            self.traffic.stop()
            self.traffic = None
        while self.channels:
            self.channels.popitem()[1].close()
        if self.plugin is not None:
            self.plugin.close()


def _until(attempt: Any, what: str) -> _native.Channel:
    deadline = time.monotonic() + PATIENCE_S
    while (found := attempt()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: nothing within {PATIENCE_S:.0f} s")
        time.sleep(0.0005)
    channel: _native.Channel = found
    return channel


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.argv[1].encode(), type=Plan)
    serve(plan.parent, lambda: Session(plan))
