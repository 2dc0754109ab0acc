"""Training loops of many kinds, one replica's rank each: what a user writes, and nothing that only a test would.

Runs in a child of multiprocessing's fork server, which has torch imported already (trainer.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ports import claim_port
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ftar_core
from ftar_core.training.options import TrainingOptions

from .conftest import FORKS, Job
from .trainer import FEATURES, SAMPLES, as_rank, data, patient_links

WIDTH = 6


@dataclass
class LoopRecipe:
    """Which loop one rank runs. Times in ms."""

    replica: str
    environment: dict[str, str]
    log: Path
    loop: str
    steps: int = 12
    step_ms: float = 4.0
    batch_size: int = 4
    extra: dict[str, Any] = field(default_factory=dict)


def start(job: Job, *names: str, loop: str, ranks: int = 1, **options: Any) -> None:
    """Replicas NAME, or their ranks NAME/0, NAME/1."""
    for name in names:
        port = claim_port()
        for rank in range(ranks):
            settings = job.environment(name)
            if ranks > 1 or options.get("extra", {}).get("world"):
                settings |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
                settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            tag = f"{name}.{rank}" if ranks > 1 else name
            recipe = LoopRecipe(replica=name, environment=settings, log=job.path / f"{tag}.log", loop=loop, **options)
            key = f"{name}/{rank}" if ranks > 1 else name
            process = FORKS.Process(target=run, args=(recipe,), name=key)
            process.start()
            job.adopt(key, process)


def run(recipe: LoopRecipe) -> None:
    as_rank(recipe.environment, recipe.log, partial(LOOPS[recipe.loop], recipe))


def said(job: Job, name: str) -> list[dict[str, Any]]:
    """What a loop has noted, a line a step."""
    path = job.path / f"{name}.said"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Loop:
    """What all loops share: data, a session, pacing, notes."""

    def __init__(self, recipe: LoopRecipe) -> None:
        self.recipe = recipe
        self.inputs, self.targets = data()
        self.common: dict[str, Any] = {"last_step": recipe.steps, "link_options": patient_links()}
        self._said = recipe.log.with_suffix(".said").open("a")

    def session(self, model: Any, optimizer: Any, **options: Any) -> ftar_core.Session:
        training = TrainingOptions(bucket_bytes=256, reduce_dtype=options.pop("reduce_dtype", None))
        self.made = ftar_core.Session(model, optimizer, options=training, **options, **self.common)
        return self.made

    def batches(self, **options: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        sampler = ftar_core.BatchSampler(SAMPLES, self.recipe.batch_size, seed=5, **options)
        for indices in self.made.batches(sampler):
            began = time.monotonic()
            yield self.inputs[indices], self.targets[indices]
            time.sleep(max(0.0, began + self.recipe.step_ms / 1000 - time.monotonic()))

    def say(self, **what: Any) -> None:
        self._said.write(json.dumps({"step": self.made.current_step, **what}) + "\n")
        self._said.flush()


def network(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - targets).square().mean()


def operating(recipe: LoopRecipe) -> None:
    """Plain tensors between the replicas, before and after backward."""
    loop = Loop(recipe)
    model = network()
    session = loop.session(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for inputs, targets in loop.batches(passes=recipe.extra.get("passes", 0)):
        dropped, step = session.warming_up, session.current_step
        count = session.allreduce(torch.tensor(len(inputs)))
        session.weight = len(inputs)
        first = session.broadcast(inputs.sum())
        loss = loss_of(model, inputs, targets)
        loss.backward()
        mean, total = session.allreduce([loss.detach(), inputs.sum(0)[:3]], "mean")
        session.barrier()
        session.step(loss)
        if not dropped and session.current_step == step + 1:
            values = [count.item(), first.item(), mean.item(), *total.tolist()]
            loop.say(values=values, of=step, contributors=session.contributors)


def forbidden(recipe: LoopRecipe) -> None:
    """Plain operations where they cannot be."""
    loop = Loop(recipe)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    errors: list[str] = []

    def attempt() -> None:
        try:
            session.allreduce(torch.ones(1))
        except ftar_core.FtarError as error:
            errors.append(f"{error}; {error.hint}")

    def update() -> None:
        attempt()
        optimizer.step()

    session = loop.session(model, optimizer, update=update)
    attempt()
    for inputs, targets in loop.batches():
        loss = loss_of(model, inputs, targets)
        loss.backward()
        session.step(loss)
        attempt()
    loop.say(errors=errors)


def scaled(recipe: LoopRecipe) -> None:
    """float16-like training with a scaler: a step overflows on one replica only."""
    loop = Loop(recipe)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    options = {"reduce_dtype": torch.bfloat16} if recipe.extra.get("bf16") else {}
    session = loop.session(model, optimizer, scheduler=scheduler, scaler=scaler, max_norm=1.0, **options)
    for inputs, targets in loop.batches():
        step = session.current_step
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, inputs, targets)
        if step == recipe.extra.get("overflow_at") and recipe.replica == "r1":
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        session.step(loss)
        loop.say(scale=scaler.get_scale(), rate=optimizer.param_groups[0]["lr"], of=step)


class Branches(nn.Module):
    """Of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(FEATURES, 1) for _ in range(3)])
        self.never = nn.Linear(2, 2)

    def forward(self, which: int, x: torch.Tensor) -> torch.Tensor:
        return self.branches[which % 3](x)


def several(recipe: LoopRecipe) -> None:
    """Two models, two optimizers, two schedules; unused parameters; accumulation; a learning rate by the share."""
    loop = Loop(recipe)
    models = {"trunk": network(), "head": Branches()}
    optimizers = {
        "trunk": torch.optim.AdamW(models["trunk"].parameters(), lr=0.01),
        "head": torch.optim.SGD(models["head"].parameters(), lr=0.02, momentum=0.5),
    }
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95) for optimizer in optimizers.values()]
    rates: list[float] = []
    optimizers["head"].register_step_pre_hook(lambda *_: rates.append(optimizers["head"].param_groups[0]["lr"]))
    session = loop.session(
        models, optimizers, scheduler=schedules, max_norm=5.0, lr_scale=lambda share: share, replicas=2
    )
    optimizers["head"].register_step_pre_hook(lambda *_: rates.append(optimizers["head"].param_groups[0]["lr"]))
    for inputs, targets in loop.batches():
        step = session.current_step
        half = len(inputs) // 2
        parts = list(zip(inputs.split(half), targets.split(half), strict=True))
        total = 0.0
        for number, (some, wanted) in enumerate(parts):
            last = number == len(parts) - 1
            with contextlib.nullcontext() if last else session.accumulate():
                loss = (models["trunk"](some) + models["head"](step, some) - wanted).square().mean() / len(parts)
                loss.backward()
            total += float(loss.detach())
        rates.clear()
        session.step(total)
        if rates:
            loop.say(of=step, rates=rates, contributors=len(session.contributors))


def constant_batch(recipe: LoopRecipe) -> None:
    """Every update is of four batches, however many replicas there are."""
    loop = Loop(recipe)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    updates: list[int] = []
    optimizer.register_step_post_hook(lambda *_: updates.append(session.current_step))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    session = loop.session(model, optimizer, scheduler=scheduler, global_batch=4)
    for inputs, targets in loop.batches(passes=recipe.extra["passes"]):
        loss = loss_of(model, inputs, targets)
        loss.backward()
        session.step(loss)
    loop.say(updates=updates, rate=optimizer.param_groups[0]["lr"])
    torch.save(model.state_dict(), recipe.log.with_suffix(".pt"))


def world(recipe: LoopRecipe) -> int:
    dist.init_process_group("gloo")
    return dist.get_world_size()


def ddp(recipe: LoopRecipe) -> None:
    """DDP over the ranks of the replica, with no_sync."""
    loop = Loop(recipe)
    world(recipe)
    model = DistributedDataParallel(network())
    session = loop.session(model, torch.optim.AdamW(model.parameters(), lr=0.01), max_norm=1.0)
    for inputs, targets in loop.batches():
        halves = [part.split(1) for part in (inputs, targets)]
        loss = torch.zeros(())
        for number, (some, wanted) in enumerate(zip(*halves, strict=True)):
            last = number == len(halves[0]) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                part = loss_of(model, some, wanted) / len(halves[0])
                part.backward()
            loss += part.detach()
        session.step(loss)
    torch.save(model.module.state_dict(), recipe.log.with_suffix(".pt"))
    dist.destroy_process_group()


class Block(nn.Module):
    """Split by tensor parallelism in the middle; its norm and its outer bias are whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, WIDTH)
        self.down = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel(recipe: LoopRecipe) -> None:
    """Both ranks of a replica compute one batch together."""
    loop = Loop(recipe)
    mesh = init_device_mesh("cpu", (world(recipe),), mesh_dim_names=("tp",))
    model = Block()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    session = loop.session(model, torch.optim.AdamW(model.parameters(), lr=0.01), max_norm=0.5)
    for inputs, targets in loop.batches(rank=0, ranks=1):
        loss = loss_of(model, inputs, targets)
        loss.backward()
        session.step(loss)
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    torch.save({n: p.detach() for n, p in whole.items()}, recipe.log.with_suffix(".pt"))
    dist.destroy_process_group()


def mesh_of(recipe: LoopRecipe) -> DeviceMesh:
    ftar_core.register_backend()
    ranks = world(recipe)
    if recipe.extra.get("from_group"):
        shard: Any = dist.new_group(list(range(ranks)), backend="gloo")
        groups = [ftar_core.process_group(), shard]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(groups, "cpu", mesh=[list(range(ranks))], mesh_dim_names=names)
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (1, ranks), mesh_dim_names=names, backend_override={"replicate": "ftar"})


def hsdp(recipe: LoopRecipe) -> None:
    """As torchtitan: a mesh with a replicate dimension, FSDP2 over it, accumulation, clipping, a mean by all_reduce."""
    loop = Loop(recipe)
    mesh = mesh_of(recipe)
    model = network()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = loop.session(model, optimizer, max_norm=1.0)
    group = mesh["replicate"].get_group()
    errors: list[str] = []
    for inputs, targets in loop.batches():
        step = session.current_step
        dropped = session.warming_up
        half = len(inputs) // 2
        for number, (some, wanted) in enumerate(zip(inputs.split(half), targets.split(half), strict=True)):
            model.set_requires_gradient_sync(number == 1)
            loss = loss_of(model, some, wanted) / 2
            loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        if step == 2 and not dropped:
            errors += refusals(group)
        session.step(loss)
        if not dropped:
            loop.say(of=step, mean=mean.item(), errors=errors)
    dist.destroy_process_group()


def refusals(group: Any) -> list[str]:
    x, out = torch.ones(2), torch.empty(2)
    attempts: list[Callable[[], object]] = [
        lambda: dist.all_gather([out], x, group=group),
        lambda: dist.all_gather_into_tensor(out, x, group=group),
        lambda: dist.reduce_scatter_tensor(out, x, group=group),
        lambda: dist.all_to_all_single(out, x, group=group),
        lambda: dist.reduce(x, dist.get_rank(), group=group),
        lambda: dist.scatter(out, [x], dist.get_rank(), group=group),
        lambda: dist.gather(x, [out], dist.get_rank(), group=group),
        lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group),
        lambda: DistributedDataParallel(nn.Linear(2, 2), process_group=group),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
            errors.append("none")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def wrapped_across(recipe: LoopRecipe) -> None:
    """One torchrun over all replicas, and the model wrapped over it."""
    rank, ranks, port = recipe.extra["rank"], 2, recipe.extra["port"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    loop = Loop(recipe)
    if recipe.extra["what"] == "ddp":
        model: nn.Module = DistributedDataParallel(network())
        loop.session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = network()
        loop.session(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))


LOOPS: dict[str, Callable[[LoopRecipe], None]] = {
    loop.__name__: loop
    for loop in (
        operating,
        forbidden,
        scaled,
        several,
        constant_batch,
        ddp,
        tensor_parallel,
        hsdp,
        wrapped_across,
    )
}
__all__ = ["LOOPS", "WIDTH", "Block", "Branches", "LoopRecipe", "loss_of", "network", "os", "said", "start"]
