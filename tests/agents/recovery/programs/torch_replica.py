"""A training step with torch in a forked process: threads, autograd and OpenMP must work there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

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
    facts = {
        "imported_by": IMPORTED_BY,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "losses": losses,
        "product": product,
        "native": "ftar_core.native._core" in sys.modules,
    }
    Path(argv[0]).write_text(json.dumps(facts), encoding="utf-8")
    return 0
