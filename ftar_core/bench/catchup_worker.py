"""One end of `bench catchup`: `python -m ftar_core.bench.catchup_worker JSON`, a source of state or a shadow that
fetches it, as it is told by JSON lines on stdin. Started by catchup.py, in the place it measures.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import msgspec
import torch

from ftar_core.bench.serving import serve
from ftar_core.runtime.rails import Rail
from ftar_core.training.dial import Identity
from ftar_core.training.follow import Follower, ReplayStep
from ftar_core.training.plan import BucketPlan, make_plan
from ftar_core.training.state import LiveState, look_at_state, raw_bytes
from ftar_core.training.statewire import CHUNK_BYTES
from ftar_core.training.transfer import StateServer
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import Endpoint, MemberInfo, RankInfo

JOB, TOKEN = "bench", b"a token of a benchmark"
EPOCH = EpochId(Term(1, "bench"), 1)
TENSORS = 16
PATIENCE_S = 80.0


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    parent: int  # process id of the benchmark: this process ends with it
    abi: int  # of no use here


class State:
    """`size` bytes in a few tensors, the same on every source."""

    def __init__(self, size: int) -> None:
        self.tensors = [
            torch.arange(size // TENSORS // 8, dtype=torch.int64).mul_(0x9E3779B97F4A7C15 - (1 << 64)).add_(n)
            for n in range(TENSORS)
        ]

    def state_dict(self) -> dict[str, object]:
        return {f"t{n}": tensor for n, tensor in enumerate(self.tensors)}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        raise NotImplementedError

    def same(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return len(tensors) == TENSORS and all(torch.equal(a, b) for a, b in zip(self.tensors, tensors, strict=True))


def small_plan() -> BucketPlan:
    return make_plan(torch.nn.Linear(2, 2))


class Session:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.plan = small_plan()
        self.state: State | None = None
        self.server: StateServer | None = None

    # --- a source

    def hold(self, rails: list[list[str]], size: int, mbit: float) -> list[list[Any]]:
        self.state = State(size)
        self.server = StateServer(
            job=JOB,
            token=TOKEN,
            plan=self.plan.hash,
            rails=[Rail(name, device, address) for name, device, address in rails],
            on_request=lambda: None,
            mbit=mbit,
        )
        self.server.serve(True)
        return [[e.rail, e.addr, e.port] for e in self.server.endpoints]

    def asked(self) -> bool:
        """A shadow waits for a copy."""
        return self._source()[0].wanted()

    def cpu(self) -> float:
        """Seconds that this process has computed."""
        return time.process_time()

    def copy(self, step: int) -> list[float]:
        """A boundary: copy the state for whoever has asked. [seconds, of CPU]"""
        server, state = self._source()

        def live() -> LiveState:
            return look_at_state({"state": state})

        began, before = time.monotonic(), time.process_time()
        server.look(step, EPOCH, live, behind_update=True)
        problem = _finish_copy(server)
        if problem:
            raise RuntimeError(problem)
        return [time.monotonic() - began, time.process_time() - before]

    def _source(self) -> tuple[StateServer, State]:
        if self.server is None or self.state is None:
            raise RuntimeError("this process holds no state")
        return self.server, self.state

    # --- the peer: the plainest code that brings as many bytes into memory of their own

    def listen_bare(self, address: str) -> int:
        self.listener = socket.create_server((address, 0))
        self.listener.settimeout(PATIENCE_S)
        return int(self.listener.getsockname()[1])

    def send_bare(self, size: int) -> None:
        _, state = self._source()
        end, _ = self.listener.accept()
        with end:
            end.settimeout(None)
            for tensor in state.tensors:
                end.sendall(raw_bytes(tensor))
        self.listener.close()

    def receive_bare(self, here: str, address: str, port: int, size: int) -> float:
        """Seconds from the connection on."""
        with socket.create_connection((address, port), PATIENCE_S, source_address=(here, 0)) as end:
            end.settimeout(None)
            began = time.monotonic()
            memory = raw_bytes(torch.empty(size, dtype=torch.uint8))
            done = 0
            while done < size:
                count = end.recv_into(memory[done : done + CHUNK_BYTES], 0, socket.MSG_WAITALL)
                if count == 0:
                    raise ConnectionError("the bare copy ends too early")
                done += count
            return time.monotonic() - began

    # --- a shadow

    def fetch(self, rails: list[list[str]], sources: dict[str, list[list[Any]]], size: int, check: bool) -> list[Any]:
        """[seconds from the offer to the last verified byte, {source: bytes}]"""
        news = threading.Event()
        members = [
            MemberInfo(replica=name, incarnation=1, slot=slot, ranks=(_rank(endpoints),))
            for slot, (name, endpoints) in enumerate(sources.items())
        ]
        follower = Follower(
            identity=Identity(JOB, TOKEN, "shadow", 1),
            plan=self.plan,
            rails=[Rail(name, device, address) for name, device, address in rails],
            sources=members,
            have=-1,
            on_news=news.set,
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while (item := follower.poll()) is None:
                if time.monotonic() > deadline or follower.refused:
                    raise RuntimeError(follower.refused or f"nothing within {PATIENCE_S:.0f} s: {follower.text}")
                news.wait(0.05)
                news.clear()
        finally:
            follower.close()
        if isinstance(item, ReplayStep) or item.state is None:
            raise RuntimeError("a step came instead of a state")
        if check and not State(size).same(item.state.tensors):
            raise RuntimeError("the state that was fetched is not the one that was held")
        return [item.seconds, dict(item.by_source)]


def _finish_copy(server: StateServer) -> str:
    """This source trains nothing: it gives a copy all the time it wants."""
    copier = server.shelf.copier
    deadline = time.monotonic() + PATIENCE_S
    while copier.busy and time.monotonic() < deadline:
        time.sleep(0.001)
    return server.settle()


def _rank(endpoints: list[list[Any]]) -> RankInfo:
    state = tuple(Endpoint(rail=str(rail), addr=str(addr), port=int(port)) for rail, addr, port in endpoints)
    return RankInfo(rank=0, node="bench", links=(), state=state)


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.argv[1].encode(), type=Plan)
    serve(plan.parent, Session)
