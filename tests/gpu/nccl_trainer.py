"""One replica of a job on a GPU: `nccl_trainer.py FILE`, a line there for each step (test_nccl_plane.py)."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ftar_core
from ftar_core.native import core
from ftar_core.training.options import TrainingOptions


def main() -> None:
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(512, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    links = core.Options()
    links.heartbeat_misses, links.unreachable_ms = 40, 2000
    session = ftar_core.Session(model, optimizer, options=TrainingOptions(bucket_bytes=1 << 20), link_options=links)
    before = time.monotonic()
    with Path(sys.argv[1]).open("a") as out:
        for indices in session.batches(512, 8):
            dropped, step = session.warming_up, session.current_step
            loss = model(inputs[indices]).square().mean()
            loss.backward()
            session.step(loss)
            if not dropped and session.current_step == step + 1:
                flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
                digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
                now = time.monotonic()
                out.write(f"{step} {','.join(session.contributors)} {digest} {now - before:.6f}\n")
                out.flush()
                before = now


if __name__ == "__main__":
    main()
