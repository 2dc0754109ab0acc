"""A replica small enough to start a dozen of in a test: a two-layer network on a synthetic regression task.

Runs in a child of multiprocessing's fork server, which has torch imported already.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import nn

import ftar_core
from ftar_core.native import core
from ftar_core.training.options import TrainingOptions
from ftar_core.training.state import state_digest

from .network import enter_namespace
from .ondevice import reduce_on_the_cpu_as_a_device

PATIENT_MS = 20_000
SAMPLES = 512
FEATURES = 8


def patient_links(unreachable_ms: int = PATIENT_MS) -> core.Options:
    """For replicas on a machine that may be busy: that is no dead rail."""
    links = core.Options()
    links.hold_down_ms = 20
    links.heartbeat_misses, links.unreachable_ms = min(100, unreachable_ms // links.heartbeat_ms), unreachable_ms
    links.handshake_ms = max(links.handshake_ms, unreachable_ms)
    return links


@dataclass(frozen=True)
class Trouble:
    """What a replica does at the begin of a step for `seconds`: gil (sleeps and holds it), lock (waits for one that
    nobody gives back), checkpoint (sleeps, in a phase with a budget)."""

    kind: str
    step: int
    seconds: float
    budget: float = 60.0

    def happen(self, session: ftar_core.Session) -> None:
        if self.kind == "gil":
            ctypes.PyDLL(None).usleep(int(self.seconds * 1e6))
        elif self.kind == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        else:
            with session.phase(self.kind, budget=self.budget):
                time.sleep(self.seconds)


@dataclass
class Recipe:
    """How one replica trains. Times in ms."""

    replica: str
    environment: dict[str, str]
    log: Path
    steps: int = 30
    step_ms: float = 10.0
    width: int = 24
    seed: int = 0
    batch_size: int = 4
    momentum: float = 0.9
    odd_sample_nan_at: int = 0  # this replica's loss is not finite at this step
    fail_update_at: int = 0  # the update raises at this step
    stop_loop_at: int = 0  # the loop is left at this step
    frozen_width: int = 0  # of a layer that is not trained: not in the plan, but in the state
    clock_jumps: bool = False  # time.time() is an hour before or behind at every call
    troubles: tuple[Trouble, ...] = ()
    retain: str = "auto"
    retain_bytes: int = 0
    counts_calls: bool = False  # the model changes a buffer in forward
    turns: Path | None = None  # where each turn of the loop writes its process and step
    chunk_bytes: int = 0  # of the ring; 0: the default
    unreachable_ms: int = PATIENT_MS  # so long all rails to a peer are dead before it is told of
    namespace: str = ""  # network namespace to enter, a path
    checkpoint: ftar_core.Checkpoint | None = None
    file_bytes: int = 0  # no file of this process grows beyond (RLIMIT_FSIZE): a disk that is full
    on_device: bool = False  # gradients are reduced as those of a GPU are (ondevice.py)
    max_norm: float = 0.0  # gradients are clipped to it; 0: they are not
    nccl_abort_s: float = 30.0
    before: Callable[[], None] | None = None  # done in the process first
    states: Path | None = None  # where the digest of the whole state is written after each step


def model_of(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, FEATURES)[:, None]


def note_turn(file: Path | None, session: ftar_core.Session) -> None:
    """One write a line: a process may be killed anywhere."""
    if file is not None and not session.warming_up:
        with file.open("a") as out:
            out.write(f"{os.getpid()} {session.current_step}\n")


def note_state(file: Path, step: int, *parts: nn.Module | torch.optim.Optimizer) -> None:
    with file.open("a") as out:
        out.write(f"{step} {' '.join(map(state_digest, parts))}\n")


def as_rank(environment: dict[str, str], log_file: Path, work: Callable[[], None]) -> None:
    """Turn this child into a rank: its output to the log, its environment, one clear line for an error of ours."""
    with log_file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        work()
    except ftar_core.FtarError as error:
        print(f"error: {error}\nhint: {error.hint}", flush=True)
        sys.exit(2)


def run(recipe: Recipe) -> None:
    if recipe.namespace:
        enter_namespace(recipe.namespace)
    as_rank(recipe.environment, recipe.log, partial(train, recipe))


def jump() -> None:
    real, turns = time.time, cycle((3600, -3600))
    time.time = lambda: real() + next(turns)


def train(recipe: Recipe) -> None:
    if recipe.clock_jumps:
        jump()
    if recipe.before is not None:
        recipe.before()
    if recipe.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (recipe.file_bytes, recipe.file_bytes))
    if recipe.on_device:
        reduce_on_the_cpu_as_a_device()
    inputs, targets = data()
    model = model_of(recipe.width, recipe.seed)
    if recipe.frozen_width:
        model.append(nn.ModuleDict({"frozen": nn.Linear(1, recipe.frozen_width).requires_grad_(False)}))
    if recipe.counts_calls:
        model.append(Counted())
    body = model[:3] if recipe.frozen_width else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=recipe.momentum)
    links = patient_links(recipe.unreachable_ms)
    if recipe.chunk_bytes:
        links.chunk_bytes = recipe.chunk_bytes

    def update() -> None:
        if session.current_step == recipe.fail_update_at:
            raise RuntimeError("on purpose")
        if recipe.max_norm:
            ftar_core.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()

    session = ftar_core.Session(
        model,
        optimizer,
        update=update,
        last_step=recipe.steps,
        checkpoint=recipe.checkpoint,
        options=TrainingOptions(
            bucket_bytes=512,
            retain=recipe.retain,
            retain_bytes=recipe.retain_bytes,
            reduce="device" if recipe.on_device else "",
            nccl_abort_s=recipe.nccl_abort_s,
        ),
        link_options=links,
    )
    for indices in session.batches(SAMPLES, recipe.batch_size, seed=5):
        began = time.monotonic()
        for trouble in recipe.troubles:
            if trouble.step == session.current_step:
                trouble.happen(session)
        if session.current_step == recipe.stop_loop_at:
            break
        note_turn(recipe.turns, session)
        loss = (body(inputs[indices]) - targets[indices]).square().mean()
        if session.current_step == recipe.odd_sample_nan_at:
            loss = loss * float("nan")
        time.sleep(max(0.0, began + recipe.step_ms / 1000 - time.monotonic()))
        loss.backward()
        step = session.current_step
        session.step(loss, tokens=len(indices))
        if recipe.states is not None:
            note_state(recipe.states, step, model, optimizer)
    print("loop ended", flush=True)
