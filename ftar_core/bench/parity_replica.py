"""A replica of `bench parity`: the example's model and data, trained on a fixed number of tokens, each of them once.

What befalls it is in its plan (parity_plan.py). When the job has ended, the first of its contributors measures the loss
on text that nobody trained on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import ftar_core
from ftar_core.bench.board import Board
from ftar_core.bench.parity_plan import Fate, Storm, strikes
from ftar_core.native import core
from ftar_core.runtime import breakpoints
from ftar_core.training.example_model import ByteGPT, Shape, SourceText
from ftar_core.training.sampling import permuted
from ftar_core.wire.breakpoints import Spec

HELD_OUT = 512  # windows of text
TEXT_SEED = 20  # which windows are held out, and which are trained in a run of so many: the same in all runs
EVALUATED = 64  # windows at once
LOOK_S = 0.001


@lru_cache(1)
def text_of(context: int) -> SourceText:
    return SourceText(context)


def prepare() -> int:
    """How many samples there are to train on."""
    return len(text_of(Shape.context)) - HELD_OUT


def windows_at(text: SourceText, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows in the fixed order in which the first HELD_OUT ones are held out."""
    found = [permuted(int(place), len(text), TEXT_SEED, 0) for place in places]
    return text.windows(torch.tensor(found, dtype=torch.int64))


def main(options: Mapping[str, Any]) -> None:
    replica, replicas = str(options["replica"]), [str(name) for name in options["replicas"]]
    shape = Shape(**options["shape"])
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    text = text_of(shape.context)
    model = ByteGPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["learning_rate"])
    sampler = ftar_core.BatchSampler(options["samples"], options["batch_size"], seed=options["seed"], passes=1)
    links = core.Options()
    links.heartbeat_misses, links.unreachable_ms = 100, 10_000  # a busy machine is no dead rail
    wanted = int(options["wanted"])
    session = ftar_core.Session(
        model,
        optimizer,
        global_batch=wanted if options["batch"] == "global_batch" else 0,
        lr_scale=(lambda share: share**0.5) if options["batch"] == "lr_scale" else None,
        replicas=wanted,
        link_options=links,
    )
    board = Board(Path(options["board"]), replicas)
    storm = Storm(**options["storm"]) if options["storm"] is not None else None
    fate = Fate(strikes(storm, replicas, int(options["seed"])) if storm is not None else iter(()))
    board.arrived(replica, os.getpid())
    for indices in session.batches(sampler):
        if not session.warming_up:
            _begin(session, board, fate, storm.out if storm is not None else 0)
        inputs, targets = windows_at(text, indices + HELD_OUT)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        session.step(loss, tokens=targets.numel())
    result = Path(options["result"])
    if _first(result):
        _write(result, held_out_loss(model, text))


def _begin(session: ftar_core.Session, board: Board, fate: Fate, out: int) -> None:
    """The step may begin; and this replica may be about to die in it. `out`: steps that victims are away."""
    step, began = session.current_step, time.monotonic()
    board.works_on(session.replica, step)
    while board.limit < step or time.monotonic() - began < board.pause_ms / 1000.0:
        time.sleep(LOOK_S)
    victims = fate.at(step, session.contributors)
    if victims:
        board.limit = min(board.limit, step + out - 1)  # however late the benchmark hears of it
    if session.replica in victims and breakpoints.armed is not None:
        breakpoints.armed.arm([Spec(victims[session.replica], step=step)])


def held_out_loss(model: ByteGPT, text: SourceText) -> float:
    """Mean cross-entropy in nats a byte."""
    total, model_was_training = 0.0, model.training
    model.eval()
    with torch.no_grad():
        for places in torch.arange(HELD_OUT).split(EVALUATED):
            inputs, targets = windows_at(text, places)
            logits = model(inputs).flatten(0, 1)
            each = functional.cross_entropy(logits, targets.flatten(), reduction="none")
            total += float(each.double().sum()) / targets.shape[1]  # float32 would hide what differs in its last digits
    model.train(model_was_training)
    return total / HELD_OUT


def _first(result: Path) -> bool:
    """All that come to the end hold the same bits: whoever comes first measures."""
    try:
        os.close(os.open(result.with_name("measured-by"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _write(path: Path, loss: float) -> None:
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps({"loss": loss}))
    whole.replace(path)
