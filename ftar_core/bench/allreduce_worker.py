"""One rank of `bench allreduce`: `python -m ftar_core.bench.allreduce_worker JSON`, started by allreduce.py.

The three systems take turns within one process and one run, so that whatever else the machine does hits them alike.
Rank 0 prints a JSON line a size. Every result of ours is compared with gloo's.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ftar_core.bench import _native
from ftar_core.bench.orphan import end_with_parent
from ftar_core.native import core

if TYPE_CHECKING:
    from ftar_core.native._core import Member

EPOCH = b"bench-allreduce!"
RAILS = ("127.0.0.1", "127.0.0.2")  # a primary and a backup: protection is on, as in use
WAIT_S = 60.0
WAIT_MS = 60_000


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    parent: int  # process id of the benchmark: this process ends with it
    rank: int
    ranks: int
    port: int  # of the store in which the ranks find each other, on 127.0.0.1
    token: str
    sizes: list[int]  # bytes, a multiple of 4
    seconds: float  # about how long a system is measured at a size


class Ours:
    def __init__(self, plan: Plan, store: Store) -> None:
        rails = [(f"rail{k}", "", addr) for k, addr in enumerate(RAILS)]
        self.engine = core.Engine("bench", plan.token.encode(), f"r{plan.rank}", 1, rails, core.Options())
        store.set(f"ours{plan.rank}", json.dumps(self.engine.endpoints()))
        members: list[Member] = []
        for rank in range(plan.ranks):
            found = [(str(rail), str(addr), int(port)) for rail, addr, port in json.loads(store.get(f"ours{rank}"))]
            members.append({"name": f"r{rank}", "incarnation": 1, "rails": found})
        self._poll = select.poll()
        self._poll.register(self.engine.event_fd(), select.POLLIN)
        self._step = 0
        self.engine.prepare(EPOCH, members, plan.rank)
        self.engine.activate(EPOCH)
        self._wait("ready")

    def run(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._step += 1
        event = self.engine.reduce(
            EPOCH, self._step, 0, src.data_ptr(), dst.data_ptr(), src.numel(), core.DTYPES["float32"], WAIT_MS
        )
        if event is None or event["type"] != "reduced":
            raise RuntimeError(f"no result: {event and event.get('reason')}")

    def _wait(self, wanted: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self._poll.poll(1000)
            for event in self.engine.events():
                if event["type"] == wanted:
                    return
                if event["type"] in ("failed", "peer_gone", "unreachable"):
                    raise RuntimeError(f"the ring broke: {event.get('reason', event['type'])}")
        raise TimeoutError(f"no '{wanted}' within {WAIT_S:.0f} s")


class Wire:
    """What the bytes of a ring all-reduce cost with nothing around them: each rank sends a segment to the next and
    receives one from the previous, 2(n-1) times, over one plain TCP connection each way, in one thread (csrc/bare.cpp):
    the traffic of reduce-scatter and all-gather without a sum, an acknowledgement, a heartbeat or a second rail."""

    def __init__(self, ranks: int, out: socket.socket, into: socket.socket) -> None:
        self._ends = (out, into)  # the ring borrows them
        self._ring = _native.Ring(out.fileno(), into.fileno(), ranks)

    def run(self, src: torch.Tensor, scratch: torch.Tensor) -> None:
        self._ring.run(src.data_ptr(), scratch.data_ptr(), src.nbytes)


def wire(plan: Plan, store: Store) -> Wire:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    store.set(f"wire{plan.rank}", str(listener.getsockname()[1]))
    port = int(store.get(f"wire{(plan.rank + 1) % plan.ranks}"))
    out = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    listener.settimeout(WAIT_S)
    into, _ = listener.accept()
    listener.close()
    for end in (out, into):  # as our own data sockets: a host's default may waste a short fat link
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, core.Options().congestion.encode())
    return Wire(plan.ranks, out, into)


def measure(plan: Plan, size: int, systems: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median microseconds of one all-reduce on this rank, by system; rounds of all systems take turns."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    pilot = torch.zeros(1)
    for name, run in systems.items():  # warm up, and find out how often is enough
        dist.barrier()
        began = time.perf_counter()
        run()
        run()
        pilot[0] = max(float(pilot[0]), (time.perf_counter() - began) / 2)
        times[name].clear()
    dist.all_reduce(pilot, op=dist.ReduceOp.MAX)  # all ranks must repeat equally often
    rounds = 5
    each = max(2, min(200, int(plan.seconds / rounds / max(float(pilot[0]), 1e-6))))
    for _ in range(rounds):
        for name, run in systems.items():
            dist.barrier()
            for _ in range(each):
                began = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: median(found) for name, found in times.items()} | {"count": float(rounds * each)}


def main() -> int:
    plan = msgspec.json.decode(sys.argv[1].encode(), type=Plan)
    end_with_parent(plan.parent)
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", plan.port, plan.ranks, plan.rank == 0, timeout=timedelta(seconds=WAIT_S)
    )
    dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=plan.rank, world_size=plan.ranks)
    ours, bare = Ours(plan, store), wire(plan, store)
    for size in plan.sizes:
        generator = torch.Generator().manual_seed(plan.rank)
        src = torch.randn(size // 4, generator=generator)
        dst, theirs = torch.zeros_like(src), src.clone()
        ours.run(src, dst)
        dist.all_reduce(theirs)
        if not torch.allclose(dst, theirs, rtol=1e-4, atol=1e-4):
            raise RuntimeError(f"the sum of {size} bytes differs from gloo's")
        scratch = torch.zeros_like(src)

        def of_ours(src: torch.Tensor = src, dst: torch.Tensor = dst) -> None:
            ours.run(src, dst)

        def of_gloo(theirs: torch.Tensor = theirs) -> None:
            dist.all_reduce(theirs)

        def of_wire(src: torch.Tensor = src, scratch: torch.Tensor = scratch) -> None:
            bare.run(src, scratch)

        theirs.zero_()  # repeated in place, it would overflow
        found = measure(plan, size, {"ours": of_ours, "gloo": of_gloo, "wire": of_wire})
        if plan.rank == 0:
            print(json.dumps({"bytes": size, **found}), flush=True)
    dist.barrier()
    ours.engine.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
