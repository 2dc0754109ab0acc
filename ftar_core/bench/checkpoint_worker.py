"""One of the two replicas of `bench checkpoint`: rounds of steps with a checkpoint at their beginning, and without."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ftar_core
from ftar_core.bench.overhead_worker import BATCH, SEED, Side
from ftar_core.training.checkpoints.keeper import Keeper
from ftar_core.training.example_model import Shape

IDLE_S = 120.0


def work(request: Mapping[str, Any]) -> None:
    """Lines of JSON into request["found"], from rank 0: sizes, then the seconds of each step of a round."""
    torch.set_num_threads(1)
    rank, steps, rounds = int(request["rank"]), int(request["steps"]), int(request["rounds"])
    os.environ.update(request["environment"])
    side = Side(Shape(**request["shape"]))
    side.alone()
    kept = ftar_core.Checkpoint(request["kept"], every=steps, at_end=False, keep=2)
    # The first steps warm up.
    session = ftar_core.Session(side.model, side.optimizer, last_step=steps * (rounds + 2), checkpoint=kept)
    turns = iter(session.batches(side.text, BATCH, seed=SEED))
    pace_s = float(request["pace"]) / 1000.0

    def step() -> float:
        indices = next(turns)
        began = time.monotonic()
        loss = side.loss(side.model, indices)
        loss.backward()
        time.sleep(max(0.0, began + pace_s - time.monotonic()))
        session.step(loss)
        return time.monotonic() - began

    next_is = step()  # begins the session
    assert next_is > 0  # noqa: S101
    stepper = session._begun.stepper
    keeper = stepper._keeper
    assert keeper is not None  # noqa: S101
    for _ in range(steps - 2):
        step()
    with Path(request["found"]).open("a") as found:

        def tell(line: Mapping[str, Any]) -> None:
            if rank == 0:
                found.write(json.dumps(line) + "\n")
                found.flush()

        tell({"state_bytes": _state_bytes(side)})
        for number in range(rounds):
            # The next step is a multiple of `steps`: behind it a checkpoint is due, if there is somebody to keep it.
            on = number % 4 in (0, 3)
            stepper._keeper = keeper if on else None
            before, cpu = keeper.written, time.process_time()
            times = [step()]
            copied = stepper.applied
            times += [step() for _ in range(steps - 1)]
            _idle(keeper)
            done = on and keeper.written == copied != before
            late = on and keeper.written not in (before, copied)
            tell({"on": on, "times": times, "cpu": time.process_time() - cpu, "written": done, "late": late})
        stepper._keeper = keeper
    for _ in turns_left(session, turns, side):
        pass


def turns_left(session: ftar_core.Session, turns: Any, side: Side) -> Any:
    """To the job's last step, so that all end with it."""
    for indices in turns:
        loss = side.loss(side.model, indices)
        loss.backward()
        session.step(loss)
        yield indices


def _state_bytes(side: Side) -> int:
    of_model = sum(p.numel() * p.element_size() for p in side.model.parameters())
    kept = [t for state in side.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return of_model + sum(t.numel() * t.element_size() for t in kept)


def _idle(keeper: Keeper) -> None:
    """What was due in this round is on disk: the next one is undisturbed."""
    by = time.monotonic() + IDLE_S
    with keeper._changed:
        keeper._changed.wait_for(lambda: keeper._task is None and keeper._working is None, by - time.monotonic())
