"""What one replica runs, in each of the systems: the example's model and data, one pace, one journal.

Every system gets the same three lines a step into the journal's `step`: t_begin, t_produced (the last gradient),
t_commit (the update is done). A step that was computed and thrown away is a line `thrown`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ftar_core.bench.models import PACED
from ftar_core.training.example import Pace
from ftar_core.training.example_model import ByteGPT, Shape, SourceText
from ftar_core.training.journal import Journal

BATCH = 2
LEARNING_RATE = 1e-3
MEET_S = 60.0  # for all replicas of `restart` to be there; what counts as death afterwards is much less


@dataclass(frozen=True)
class Plan:
    """`number` counts the replicas from 0, of which `replicas` contribute. `device`: its NIC; none: loopback.
    `settings`: seconds, names and addresses, as the system needs them."""

    system: str
    replica: str
    number: int
    replicas: int
    life: int
    step_ms: float
    model: str
    seed: int
    journal: str
    address: str
    device: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Trainer:
    """Model, data, pace and journal of a replica."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed)  # every replica begins with the same parameters
        shape = Shape(**PACED[plan.model])
        self.plan = plan
        self.text = SourceText(shape.context)
        self.model = ByteGPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.journal = Journal(Path(plan.journal), plan.replica)
        self.journal.write("start", {"life": plan.life, "pid": os.getpid()})
        self._pace = Pace(plan.step_ms / 1000.0)
        self._order = torch.randperm(len(self.text), generator=torch.Generator().manual_seed(plan.seed))
        self._flat = torch.zeros(sum(p.numel() for p in self.model.parameters()))
        self.began = self.produced = 0.0

    def indices(self, step: int) -> torch.Tensor:
        """The samples of this replica in a step, where the system does not deal them itself."""
        first = (step * self.plan.replicas + self.plan.number) * BATCH
        return self._order[torch.arange(first, first + BATCH) % len(self._order)]

    def compute(self, indices: torch.Tensor) -> torch.Tensor:
        """Forward and backward, paced. The loss."""
        self.began = time.monotonic()
        self._pace.begin()
        inputs, targets = self.text.windows(indices)
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self._pace.before_backward()
        loss.backward()
        self._pace.after_backward()
        self.produced = time.monotonic()
        return loss

    def gather(self) -> torch.Tensor:
        """All gradients as one bucket (of at most 4 MB: less than the 25 MB of one of DDP's)."""
        torch.cat([_grad(p).flatten() for p in self.model.parameters()], out=self._flat)
        return self._flat

    def scatter(self) -> None:
        place = 0
        for parameter in self.model.parameters():
            size = parameter.numel()
            _grad(parameter).copy_(self._flat[place : place + size].view_as(parameter))
            place += size

    def committed(self, step: int, contributors: int, names: tuple[str, ...] = ()) -> None:
        self.journal.write(
            "step",
            {
                "step": step,
                "replica": self.plan.replica,
                "life": self.plan.life,
                "contributors": contributors,
                "names": list(names),
                "t_begin": self.began,
                "t_produced": self.produced,
                "t_commit": time.monotonic(),
            },
        )

    def thrown(self, step: int) -> None:
        self.journal.write(
            "thrown", {"step": step, "life": self.plan.life, "t_begin": self.began, "t_produced": self.produced}
        )

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def train_ftar(plan: Plan) -> None:
    import ftar_core

    mine = Trainer(plan)
    session = ftar_core.Session(mine.model, mine.optimizer)
    for indices in session.batches(mine.text, BATCH, seed=plan.seed):
        step = session.current_step
        session.step(mine.compute(indices))
        if session.current_step > step:  # a warm-up turn is not a step
            mine.committed(step, len(session.contributors), session.contributors)


def train_torchft(plan: Plan) -> None:
    """Its manager by hand, as its optimizer wrapper and its DDP drive it: the quorum runs beside the forward pass, and
    a replica that heals adds zeros in the step in which it does."""
    groups, managers = import_module("torchft.process_group"), import_module("torchft.manager")
    mine, settings = Trainer(plan), plan.settings
    store: Any = import_module("torch.distributed").TCPStore(plan.address, 0, is_master=True, wait_for_workers=False)
    beats = {"heartbeat_interval": timedelta(seconds=settings["heartbeat"])} if "heartbeat" in settings else {}
    waits = {"timeout": timedelta(seconds=settings["collective_timeout"])} if "collective_timeout" in settings else {}
    manager = managers.Manager(
        pg=groups.ProcessGroupGloo(**waits),
        load_state_dict=mine.load,
        state_dict=mine.state,
        min_replica_size=1,
        init_sync=False,  # as its documentation says for replicas that begin with the same parameters
        rank=0,
        world_size=1,
        store_addr=plan.address,
        store_port=store.port,
        lighthouse_addr=settings["lighthouse"],
        replica_id=plan.replica,
        hostname=plan.address,
        **beats,
    )
    while True:
        step = manager.current_step() + 1
        manager.start_quorum()
        mine.optimizer.zero_grad(set_to_none=False)
        mine.compute(mine.indices(step))
        manager.allreduce(mine.gather()).wait()
        mine.scatter()
        if manager.should_commit():
            mine.optimizer.step()
            mine.committed(manager.current_step(), manager.num_participants())
        else:
            mine.thrown(step)


def train_restart(plan: Plan) -> None:
    """Fully synchronous: a plain all-reduce, a checkpoint every so many steps, and the end at the first error. An
    all-reduce waits for the others no longer than `collective_timeout`, from the end of this replica's own paced step
    on; only the first one, in which they meet, takes its time: they do not start at the same moment."""
    mine, settings = Trainer(plan), plan.settings
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings['rendezvous']}.{plan.life}",
        rank=plan.number,
        world_size=plan.replicas,
        timeout=timedelta(seconds=MEET_S),
    )
    kept = Path(settings["checkpoint"])
    begun = 0
    if kept.exists():
        found = torch.load(kept, weights_only=True)
        mine.load(found["state"])
        begun = int(found["step"])
    dist.barrier()
    group: Any = dist.group.WORLD
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=settings["collective_timeout"]))
    for step in itertools.count(begun + 1):
        mine.optimizer.zero_grad(set_to_none=False)
        mine.compute(mine.indices(step))
        dist.all_reduce(mine.gather().div_(plan.replicas))
        mine.scatter()
        mine.optimizer.step()
        mine.committed(step, plan.replicas)
        if plan.number == 0 and step % int(settings["checkpoint_every"]) == 0:
            fresh = kept.with_suffix(".new")
            torch.save({"step": step, "state": mine.state()}, fresh)
            fresh.replace(kept)


TRAINERS: dict[str, Callable[[Plan], None]] = {
    "ftar": train_ftar,
    "torchft": train_torchft,
    "restart": train_restart,
}
