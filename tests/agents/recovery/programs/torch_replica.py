"""A training step with torch in a forked process: threads, autograd and OpenMP must work there."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from pathlib import Path

import torch

NATIVE = None
with contextlib.suppress(ImportError):
    NATIVE = importlib.import_module("ftar_core.native._core")
IMPORTED_BY = os.getpid()


def main(argv: list[str]) -> int:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 256)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    big = torch.randn(600, 600)
    product = float((big @ big).abs().sum())  # large enough for a parallel region
    endpoints = []
    if hasattr(NATIVE, "Engine"):  # its I/O thread is started here, in the child
        engine = NATIVE.Engine("demo", b"t" * 32, "r1", 1, [("lo", "", "127.0.0.1")], NATIVE.Options())
        endpoints = engine.endpoints()
        engine.close()
    facts = {
        "imported_by": IMPORTED_BY,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "losses": losses,
        "product": product,
        "native": hasattr(NATIVE, "Engine"),
        "endpoints": endpoints,
    }
    Path(argv[0]).write_text(json.dumps(facts), encoding="utf-8")
    return 0
