"""A replica that trains what a loader brings, and writes down what that was: the samples of each turn of its loop."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ftar_core
from ftar_core.native import core
from ftar_core.training.options import TrainingOptions


@dataclass
class DataRecipe:
    """`slow`: while this file exists, a step takes at least `step_ms`, and much longer when most data is trained, so
    that the job does not end before the file is taken away."""

    environment: dict[str, str]
    log: Path
    turns: Path
    slow: Path
    samples: int = 1200
    batch_size: int = 4
    passes: int = 1
    workers: int = 2
    step_ms: float = 25.0
    steps: int = 0
    stream: bool = False
    promised: int = 0  # batches of the stream, if not as many as there are
    seed: int = 3
    checkpoint: Path | None = None  # read before the job, written at its end


class Samples(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), float(index % 17) - 8.0)


def source_of(recipe: DataRecipe) -> ftar_core.BatchSampler:
    return ftar_core.BatchSampler(recipe.samples, recipe.batch_size, seed=recipe.seed, passes=recipe.passes)


class Tokens:
    """Item b of a stream: what batch b of the sampler would be, unshuffled."""

    def __init__(self, recipe: DataRecipe) -> None:
        self.samples = Samples(recipe.samples)
        self.batch_size, self.at = recipe.batch_size, 0

    def seek(self, item: int) -> None:
        self.at = item

    def __iter__(self) -> Tokens:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.at * self.batch_size
        if first >= len(self.samples):
            raise StopIteration
        self.at += 1
        items = [self.samples[index] for index in range(first, first + self.batch_size)]
        return torch.tensor([index for index, _ in items]), torch.stack([x for _, x in items])


def run(recipe: DataRecipe) -> None:
    with recipe.log.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    os.environ.update(recipe.environment)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # not this test's fork server: workers start as in a script
    try:
        train(recipe)
    except ftar_core.FtarError as error:
        print(f"error: {error}\nhint: {error.hint}", flush=True)
        sys.exit(2)


def train(recipe: DataRecipe) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    links = core.Options()
    links.hold_down_ms = 20
    links.heartbeat_misses = 60  # a busy machine is no dead rail
    session = ftar_core.Session(
        model,
        optimizer,
        last_step=recipe.steps,
        options=TrainingOptions(bucket_bytes=512),
        link_options=links,
    )
    sampler = source_of(recipe)
    source: ftar_core.Stream[Any] | ftar_core.BatchSampler
    if recipe.stream:
        batches = recipe.promised or recipe.samples // recipe.batch_size
        source = ftar_core.Stream(Tokens(recipe), batches=batches, workers=recipe.workers)
        data = session.data(source)
    else:
        source = sampler
        if recipe.checkpoint is not None and recipe.checkpoint.exists():
            saved = torch.load(recipe.checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            sampler.load_state_dict(saved["data"])
        data = session.data(DataLoader(Samples(recipe.samples), batch_sampler=sampler, num_workers=recipe.workers))
    with recipe.turns.open("a", buffering=1) as turns:
        for indices, inputs in data:
            began = time.monotonic()
            if not session.warming_up:
                turns.write(json.dumps([session.current_step, indices.tolist()]) + "\n")
            loss = model(inputs).square().mean()
            if recipe.slow.exists():
                much = source.trained > 0.6 * source.total
                time.sleep(max(0.0, began + recipe.step_ms / 1000 * (20 if much else 1) - time.monotonic()))
            loss.backward()
            session.step(loss, tokens=len(indices))
    if recipe.checkpoint is not None and session.replica == "r0":
        torch.save({"model": model.state_dict(), "data": sampler.state_dict()}, recipe.checkpoint)
    print("loop ended", flush=True)
