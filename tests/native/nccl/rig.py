"""Two or more processes with the plugin, on loopback or in namespaces, and the connections between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ftar_core.ncclenv import plugin_path

from .. import HEARTBEAT_MS, PATIENCE
from ..net import Net
from .abi import PluginError

PEER = Path(__file__).with_name("peer.py")
LOOPBACK = "rail0=127.0.0.1,rail1=127.0.0.2"
QUICK = f"hold_down_ms=20,hold_down_max_ms=20,probe_interval_ms=10,heartbeat_ms={HEARTBEAT_MS}"
LONG_S = 40.0


class Peer:
    """One process. `ns`: its network namespace; `wrap`: a command that runs it."""

    def __init__(self, version: int = 12, ns: str = "", wrap: Sequence[str] = (), **variables: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("FTAR_") or k == "FTAR_TEST_BUILD"}
        env.update({"FTAR_NET_OPTIONS": QUICK, **variables})
        if not ns:
            env.setdefault("FTAR_NET_RAILS", LOOPBACK)
        prefix = ["ip", "netns", "exec", ns] if ns else []
        self.asking = threading.Lock()  # several threads of a test may ask
        self.process = subprocess.Popen(
            [*prefix, *wrap, sys.executable, str(PEER), str(plugin_path()), str(version)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        try:
            self.read()
        except BaseException:
            self.kill()
            raise

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        reply = json.loads(line)
        if "code" in reply:
            raise PluginError(reply.get("error", "init"), reply["code"])
        return reply["ok"]

    def ask(self, do: str, **more: Any) -> Any:
        assert self.process.stdin is not None
        with self.asking:
            self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self.process.stdin.flush()
            return self.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()


class Rig:
    """Peers and one-way connections (from, to, device there, device here), each with its own stream."""

    def __init__(
        self, net: Net | None = None, n: int = 2, version: int = 12, wrap: Sequence[str] = (), **variables: str
    ) -> None:
        self.peers: list[Peer] = []
        self.streams = 0
        try:
            for i in range(n):
                rails = (
                    ",".join(f"{name}={address}@{device}" for name, device, address in net.rail_list(i))
                    if net
                    else LOOPBACK
                )
                more = {"FTAR_NET_RAILS": rails, **variables}
                self.peers.append(Peer(version, net.ns(i) if net else "", wrap, **more))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        for peer in self.peers:
            peer.kill()

    def connect(self, sender: int, receiver: int, device_there: int = 0, device_here: int = 0) -> tuple[int, int]:
        """(send comm, receive comm)"""
        listener, handle = self.peers[receiver].ask("listen", device=device_there)
        send = self.peers[sender].ask("connect", device=device_here, handle=handle)
        receive = self.until(lambda: self.peers[receiver].ask("accept", listener=listener), "accept")
        self.peers[receiver].ask("close", kind="listen", comm=listener)
        return send, receive

    def stream(
        self,
        sender: int,
        receiver: int,
        comms: tuple[int, int],
        sizes: list[int],
        count: int = 1 << 40,
        window: int = 8,
        pause_s: float = 0.0,
    ) -> None:
        about = {"stream": self.streams, "sizes": sizes, "count": count, "window": window, "pause_s": pause_s}
        self.peers[receiver].ask("receive", comm=comms[1], **about)
        self.peers[sender].ask("send", comm=comms[0], **about)
        self.streams += 1

    def states(self) -> list[dict[str, Any]]:
        states = [s for peer in self.peers for s in peer.ask("state")]
        assert [s["error"] for s in states if s["error"]] == [], self.logs()
        return states

    def advance(self, messages: int, timeout_s: float = LONG_S) -> float:
        """Until every stream has moved so many more messages; the longest gap, in seconds."""
        goals = [s["done"] + messages for s in self.states()]
        longest = [0.0]

        def done() -> bool:
            states = self.states()
            longest[0] = max(longest[0], *(s["longest_s"] for s in states))
            return all(s["done"] >= goal for s, goal in zip(states, goals, strict=True))

        self.until(done, f"{messages} more messages", timeout_s)
        return longest[0]

    def finish(self, count: int, timeout_s: float = LONG_S) -> None:
        """All streams reach their last message."""
        self.until(lambda: all(s["done"] == count for s in self.states()), f"{count} messages everywhere", timeout_s)

    def failed(self, peer: int, timeout_s: float = LONG_S) -> list[int]:
        """The results with which all streams of a peer ended."""
        self.until(lambda: all(s["code"] for s in self.peers[peer].ask("state")), "errors", timeout_s)
        return [s["code"] for s in self.peers[peer].ask("state")]

    def links(self, peer: int) -> list[dict[str, Any]]:
        """The rails of all its links, as operators see them."""
        rails: list[dict[str, Any]] = self.peers[peer].ask("links")
        return rails

    def logs(self) -> str:
        return json.dumps([p.ask("log")[-12:] for p in self.peers if p.process.poll() is None], indent=1)

    def until(self, attempt: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> Any:
        deadline = time.monotonic() + timeout_s * PATIENCE
        while not (value := attempt()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {self.logs()}"
            time.sleep(0.005)
        return value
