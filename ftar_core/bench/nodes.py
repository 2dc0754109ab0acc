"""The two ends of a benchmark as the benchmark sees them: processes (node.py) on loopback or in namespaces."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from ftar_core.bench.report import BenchError
from ftar_core.native import core, require

ANSWER_S = 90.0
ABI = 12
LOOPBACK = ("127.0.0.1", "127.0.0.2")
UNPROTECTED = "heartbeat_ms=60000,carrier_poll_ms=60000"  # one rail, and nothing that looks after it


def require_drivers() -> None:
    """NativeMissing or BenchError: what is not built."""
    require()
    if find_spec("ftar_core.bench._native") is None:
        raise BenchError("the benchmarks' native part is not built", hint="build again: pip install -e .")


class Node:
    """One process. `place`: entered while it is started (a network namespace). BenchError: it failed, or is silent."""

    def __init__(
        self,
        name: str,
        abi: int,
        settings: Mapping[str, str],
        place: AbstractContextManager[None] | None = None,
        module: str = "ftar_core.bench.node",
    ) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("FTAR_")} | dict(settings)
        self.name = name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill()
        plan = json.dumps({"parent": os.getpid(), "abi": abi})
        with place or nullcontext():
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, plan],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=env,
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError(f"{name}: no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout
        self._buffer = b""
        try:
            self.read()
        except BaseException:
            self.kill()
            raise

    def tell(self, do: str, **more: Any) -> None:
        try:
            self._in.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def read(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to the next of the requests told."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BenchError(f"{self.name} does not answer within {timeout_s:.0f} s")
            more = os.read(self._out.fileno(), 1 << 20)
            if not more:
                raise self._gone()
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise BenchError(f"{self.name}: {reply['error']}")
        return reply["ok"]

    def ask(self, do: str, **more: Any) -> Any:
        self.tell(do, **more)
        return self.read()

    def _gone(self) -> BenchError:
        code = self._process.wait()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        return BenchError(f"{self.name} ended with {code}: {words[-1] if words else 'without a word'}")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._in.close()
        self._out.close()
        self._words.close()


class Pair:
    """Two nodes of one system, and connections between them. Nothing is connected while another system is measured:
    an idle plugin without connections sleeps."""

    def __init__(
        self,
        name: str,
        abi: int,
        addresses: Sequence[Sequence[str]],  # of each node, by rail
        devices: Sequence[str] = (),  # by rail; none: loopback
        places: Sequence[AbstractContextManager[None]] = (),
        **settings: str,
    ) -> None:
        self.name, self.bare, self.addresses = name, abi == 0, addresses
        self.nodes: list[Node] = []
        try:
            for i, mine in enumerate(addresses):
                rails = ",".join(
                    f"rail{k}={address}" + (f"@{devices[k]}" if devices else "") for k, address in enumerate(mine)
                )
                place = places[i] if places else None
                self.nodes.append(Node(f"{name} {i}", abi, {"FTAR_NET_RAILS": rails, **settings}, place))
        except BaseException:
            self.kill()
            raise

    def connect(self, sender: int, device: int = 0) -> tuple[int, int]:
        """(channel of the sender, channel of the receiver)"""
        to, receiver = self.nodes[sender], self.nodes[1 - sender]
        if self.bare:
            congestion = core.Options().congestion
            here, there = self.addresses[sender][device], self.addresses[1 - sender][device]
            listener, port = receiver.ask("listen_bare", address=there)
            out = to.ask("connect_bare", here=here, address=there, port=port, congestion=congestion)
            return out, receiver.ask("accept_bare", listener=listener, congestion=congestion)
        listener, handle = receiver.ask("listen", device=device)
        out = to.ask("connect", device=device, handle=handle)
        return out, receiver.ask("accept", listener=listener)

    def both(self, do: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Any, Any]:
        """The same request to both at the same time."""
        self.nodes[0].tell(do, **first)
        self.nodes[1].tell(do, **second)
        return self.nodes[0].read(), self.nodes[1].read()

    def transfer(self, ends: tuple[int, int], size: int, count: int, window: int) -> float:
        """Nanoseconds from the first send begun at node 0 to the last message complete at node 1."""
        about = {"size": size, "count": count, "window": window}
        self.nodes[1].tell("receive", channel=ends[1], **about)
        self.nodes[0].tell("send", channel=ends[0], **about)
        begun = self.nodes[0].read()[0]
        return float(self.nodes[1].read()[1] - begun)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
