"""One of the two replicas of `bench overhead`: it trains two equal models in turn, one in a session, one in DDP."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ftar_core
from ftar_core.training.example_model import ByteGPT, Shape, SourceText

BATCH = 2
SEED = 1
ALONE = 3  # steps without anybody else, and then with: so that all memory is there that will be
RANKS = 2


def private_bytes() -> int:
    """Memory of this process that nobody shares (Private_* of smaps_rollup, proc(5)), without what its allocator has
    been given back and keeps for later (malloc_trim(3)), which is nobody's buffer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(ctypes.c_size_t(0))
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


class Side:
    """A model, its optimizer and its data."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(SEED)
        self.text = SourceText(shape.context)
        self.model = ByteGPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        inputs, targets = self.text.windows(indices)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def alone(self) -> int:
        """Plain training, the same on both replicas. Private bytes when a step needs most: with its gradients and the
        optimizer's state there."""
        for step in range(ALONE):
            self.optimizer.zero_grad()
            loss = self.loss(self.model, torch.arange(BATCH) + step)
            loss.backward()
            self.optimizer.step()
        return private_bytes()


def work(request: Mapping[str, Any]) -> None:
    """Lines of JSON into request["found"], from rank 0. Ends the job by ending."""
    torch.set_num_threads(1)
    rank = int(request["rank"])
    os.environ.update(request["environment"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request['rendezvous']}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=300),
    )
    shape = Shape(**request["shape"])
    ours, theirs = Side(shape), Side(shape)
    before = ours.alone()
    session = ftar_core.Session(ours.model, ours.optimizer)
    turns = iter(session.batches(ours.text, BATCH, seed=SEED))

    def step_ours() -> None:
        loss = ours.loss(ours.model, next(turns))
        loss.backward()
        session.step(loss)

    for _ in range(ALONE):
        step_ours()
    grown_ours = private_bytes() - before
    before = theirs.alone()
    wrapped = DistributedDataParallel(theirs.model)
    places = itertools.count(rank * BATCH, RANKS * BATCH)

    def step_theirs(*, clear: bool = True) -> None:
        first = next(places)
        indices = torch.arange(first, first + BATCH) % len(theirs.text)
        loss = theirs.loss(wrapped, indices)
        loss.backward()
        theirs.optimizer.step()
        if clear:
            theirs.optimizer.zero_grad()

    for left in reversed(range(ALONE)):
        step_theirs(clear=left > 0)
    grown_ddp = private_bytes() - before
    theirs.optimizer.zero_grad()
    sizes = {
        "gradient_bytes": sum(p.numel() * p.element_size() for p in ours.model.parameters()),
        "retained_bytes": session._taker.retained.most_bytes,
        "grown_ours": grown_ours,
        "grown_ddp": grown_ddp,
    }
    with Path(request["found"]).open("a") as found:
        _tell(found, rank, sizes)
        for number in range(int(request["rounds"])):
            order: list[tuple[str, Callable[[], None]]] = [("ours", step_ours), ("ddp", step_theirs)]
            times: dict[str, float] = {}
            for name, step in order if number % 2 == 0 else reversed(order):
                dist.barrier()
                begun, used = time.monotonic(), time.process_time()
                for _ in range(int(request["steps"])):
                    step()
                times[name] = (time.monotonic() - begun) / int(request["steps"])
                times[f"{name}_cpu"] = (time.process_time() - used) / int(request["steps"])
            _tell(found, rank, times)
        dist.barrier()  # nobody ends while another one measures


def _tell(found: Any, rank: int, line: Mapping[str, float]) -> None:
    if rank == 0:
        found.write(json.dumps(line) + "\n")
        found.flush()
