"""One rank of a replica of several: a small network sharded by FSDP2 over gloo, clipped by its global norm.

Runs in a child of multiprocessing's fork server, which has torch imported already (trainer.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftar_core
from ftar_core.training.options import TrainingOptions

from .trainer import FEATURES, SAMPLES, as_rank, data, note_turn, patient_links

MAX_NORM = 0.5


@dataclass
class ShardedRecipe:
    """How one rank trains. Times in ms."""

    replica: str
    environment: dict[str, str]
    log: Path
    steps: int = 30
    step_ms: float = 10.0
    width: int = 5  # odd: the ranks' shards differ in size, and one of them is empty
    batch_size: int = 4
    odd_weight_on: int = -1  # a rank that says another weight than the others
    nan_at: int = 0  # the loss of rank 1 is not finite at this step
    fail_update_at: int = 0
    sharded: bool = True
    checkpoint: ftar_core.Checkpoint | None = None
    turns: Path | None = None  # where each turn of the loop writes its process and step
    before: Callable[[], None] | None = None  # done in the process first


def model_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


def run(recipe: ShardedRecipe) -> None:
    as_rank(recipe.environment, recipe.log, partial(train, recipe))


def train(recipe: ShardedRecipe) -> None:
    if recipe.before is not None:
        recipe.before()
    inputs, targets = data()
    model = model_of(recipe.width)
    if recipe.sharded:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    links = patient_links()

    def update() -> None:
        if session.current_step == recipe.fail_update_at and int(os.environ["RANK"]) == 1:
            raise RuntimeError("on purpose")
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    session = ftar_core.Session(
        model,
        optimizer,
        update=update,
        last_step=recipe.steps,
        checkpoint=recipe.checkpoint,
        options=TrainingOptions(bucket_bytes=64),
        link_options=links,
    )
    for indices in session.batches(SAMPLES, recipe.batch_size, seed=5):
        began = time.monotonic()
        if int(os.environ["RANK"]) == recipe.odd_weight_on and session.current_step == 3:
            session.weight = 2.0
        note_turn(recipe.turns, session)
        loss = (model(inputs[indices]) - targets[indices]).square().mean()
        if session.current_step == recipe.nan_at and int(os.environ["RANK"]) == 1:
            loss = loss * float("nan")
        time.sleep(max(0.0, began + recipe.step_ms / 1000 - time.monotonic()))
        loss.backward()
        session.step(loss, tokens=len(indices))
    print("loop ended", flush=True)
    if session.replica == "r0" and recipe.sharded:  # what the whole model has become, for a comparison
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        if dist.get_rank() == 0:
            torch.save(whole, recipe.log.with_suffix(".pt"))
    if recipe.sharded:
        dist.destroy_process_group()
