"""The training session: a plain PyTorch loop becomes one of several replicas that survive each other's deaths.

    import ftar_core                                                            # 1

    session = ftar_core.Session(model, optimizer)                               # 2
    for indices in session.batches(len(dataset), batch_size=8):                 # 3
        loss = loss_of(model, dataset, indices)
        loss.backward()
        session.step(loss)                                                      # 4

`batches` yields the samples that this replica was dealt for the step; `session.step()` stands where `optimizer.step()`
and `zero_grad()` stood. Who and where this process is comes from the environment (ARCHITECTURE.md, "Environment of a
rank").

A step becomes true in one place. `step()` waits until every bucket is reduced on every replica and the coordinator has
committed the step; only then are gradients put into `.grad` and `update` is run: one function that reads nothing but
reduced gradients and registered state, so that a replica that comes back can replay it and end with the same bits.
When a replica dies in between, the step is reduced again from retained gradients (exchange.py), below this file's
sight: the training thread sits in `wait` and sees a commit that comes a little later.

What ends a loop: the job's last commit (the loop ends, exit code 0); a drain, an eviction, a lost coordinator
(SystemExit with the exit code that tells a supervisor what to do next, and one line that says why).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, TypeVar, overload

import torch
from torch import nn

from ftar_core.errors import FtarError, SettingsError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.settings import Settings, read_settings
from ftar_core.training.data import BatchSampler, Source
from ftar_core.training.feed import open_feed
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.journal import Journal
from ftar_core.training.ledger import StepLedger
from ftar_core.training.operations import Kind
from ftar_core.training.options import TrainingOptions
from ftar_core.training.plain import barrier, kind_of, operate
from ftar_core.training.plan import make_plan
from ftar_core.training.retention import inputs_for
from ftar_core.training.shadow import Shadow
from ftar_core.training.state import Stateful, check_transferable, parameters_digest
from ftar_core.training.stepping import Stepper
from ftar_core.training.turns import Turn, Turns
from ftar_core.training.wiring import Wiring
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ftar_core.native._core import Options
    from ftar_core.training.stream import Stream

log = logging.getLogger("ftar.session")

T = TypeVar("T")
PHASES = {"checkpoint": Phase.CHECKPOINT, "evaluation": Phase.EVALUATION, "compile": Phase.COMPILE}
DATA = "data"  # the name of the data among the registered state


class Session:
    """One replica's part in a job.

    `update`: called with reduced gradients in `.grad`; default optimizer.step(), scheduler.step(), zero_grad().
    Clipping belongs here, since gradients are not final before. It must read nothing else but model, optimizer,
    scheduler and what is registered in `state` (name -> object with state_dict and load_state_dict). `last_step`: end
    the job after this step (0: no wish). `settings`: instead of the environment.

    Raises SettingsError (environment), PlanMismatch (a model that cannot be trained this way), StateMismatch (state
    that cannot be sent to another replica). Starts threads and sockets at the first turn of `batches`, not before."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        update: Callable[[], None] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        state: Mapping[str, Stateful] | None = None,
        last_step: int = 0,
        settings: Settings | None = None,
        options: TrainingOptions | None = None,
        link_options: Options | None = None,
    ) -> None:
        if last_step < 0:
            raise SettingsError(f"last_step={last_step}: a step number, or 0 for no end, is expected")
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._settings = settings if settings is not None else read_settings()
        self._options = options if options is not None else TrainingOptions()
        self._link_options = link_options
        self._last_step = last_step
        self._update = update if update is not None else self._default_update
        parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
        if scheduler is not None:
            parts["scheduler"] = scheduler
        for name, part in (state or {}).items():
            if name in parts:
                raise SettingsError(f"state {name!r}: the session registers that itself", hint="choose another name")
            parts[name] = part
        self._parts = parts
        check_transferable(parts)
        self.plan = make_plan(model, self._options.bucket_bytes)
        inputs, self._retention = inputs_for(
            model, self.plan, self._options.retain, self._options.retain_bytes, self._settings.world_size
        )
        self._taker = GradientTaker(model, self.plan, self._bucket_full, inputs)
        self._journal = Journal(self._settings.journal, self._settings.replica, self._settings.rank)
        self._ledger = StepLedger(self._journal)
        self._turns: Turns | None = None  # once the loop has begun

    # --- for the user's loop ---------------------------------------------------------------------------------------

    @property
    def replica(self) -> str:
        return self._settings.replica

    @property
    def running(self) -> bool:
        """The job has not ended for this replica."""
        return self._turns is None or self._turns.over is None

    @property
    def current_step(self) -> int:
        """The step that is being worked on; the first is 1."""
        return self._turns.step if self._turns is not None else 1

    @property
    def contributors(self) -> tuple[str, ...]:
        """Replicas that contributed to the last committed step."""
        return self._turns.stepper.contributors if self._turns is not None else ()

    @property
    def warming_up(self) -> bool:
        """The gradients of this turn of the loop are dropped, and its loss says nothing: it is a shadow's warm-up, or
        was not dealt a batch and only takes part in the plain operations of the others."""
        return self._turns is not None and self._turns.current in (Turn.WARM_UP, Turn.IDLE)

    @property
    def mean_loss(self) -> float | None:
        """Loss of the last committed step, averaged over the contributors by weight (the same on all of them)."""
        return self._ledger.loss

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all contributors a second, over the last step."""
        return self._ledger.tokens_per_s

    @property
    def weight(self) -> float:
        """This replica's weight in the average of the step (1 at the beginning of each). Set it before backward, for
        example to the number of tokens of the batch; on all ranks of a replica to the same value."""
        return self._taker.weight

    @weight.setter
    def weight(self, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"weight {value}: a finite number of at least 0 is expected")
        self._taker.weight = float(value)

    @contextlib.contextmanager
    def phase(self, name: str, budget: float = 600.0) -> Iterator[None]:
        """Around what may take its time: `with session.phase("checkpoint", budget=600):` writes one for up to 600
        seconds, and meanwhile this replica is not taken for hung although the others wait for it. `name`: checkpoint,
        evaluation or compile. When the budget is used up that is said, and the replica is judged as any other."""
        phase = PHASES.get(name)
        if phase is None:
            raise FtarError(f"phase {name!r} is not known", hint=f"one of {', '.join(PHASES)}")
        if not (math.isfinite(budget) and budget > 0):
            raise ValueError(f"budget {budget}: a number of seconds above 0 is expected")
        if self._turns is None or not self.running:
            yield
            return
        with self._turns.wiring.during(phase, budget):
            yield

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Around all backwards of a step but the last: gradients add up and are reduced once."""
        return self._taker.accumulate()

    def batches(
        self, dataset: Sized | int | BatchSampler, batch_size: int | None = None, *, seed: int = 0
    ) -> Iterator[torch.Tensor]:
        """Sample indices (int64, shape [batch_size]) of one step after the other, until the job ends.

        `dataset` or its length; for more than an order by `seed`, or to keep what is trained in a checkpoint, a
        BatchSampler of your own. Every sample is dealt once a pass over all replicas together. The data and these
        options must be the same on all replicas.
        """
        if isinstance(dataset, BatchSampler):
            if batch_size is not None or seed:
                raise SettingsError("batch_size and seed are the sampler's", hint="call session.batches(sampler)")
            source = dataset
        elif batch_size is None:
            raise SettingsError("batch_size is missing", hint="call session.batches(dataset, batch_size=8)")
        else:
            source = BatchSampler(dataset, batch_size, seed=seed)
        source.bind(self._settings.rank, self._settings.world_size)
        with contextlib.closing(self._loop(source)) as turns:
            for number in turns:
                yield torch.tensor(source.indices(number), dtype=torch.int64)

    def data(self, loader: DataLoader[T] | Stream[T]) -> Iterator[T]:
        """What a loader with a BatchSampler (`DataLoader(dataset, batch_sampler=...)`), or a Stream, returns for the
        batches that are dealt to this replica: one step after the other, until the job ends.

        Workers and prefetching are welcome: what was read ahead and is then dealt to another replica is dropped here,
        and read there. What is trained is remembered with the model, as part `data` of its state.
        """
        feed = open_feed(loader, self.replica, self._settings.rank, self._settings.world_size)
        with contextlib.closing(feed), contextlib.closing(self._loop(feed.source)) as turns:
            for number in turns:
                place = self._begun.wiring.exchange.place()
                members = place.epoch.names() if place.epoch is not None else ()
                try:
                    item = feed.any() if self.warming_up else feed.get(number, place.deal, members)
                except FtarError as error:
                    self._begun.leave(f"its data: {error}", RankExit.USAGE)
                    raise
                yield item

    def _loop(self, source: Source) -> Generator[int, None, None]:
        """The number of the batch of one turn after the other."""
        source.check_begin()
        if all(part is not source for part in self._parts.values()):
            if DATA in self._parts:
                raise SettingsError(f"state {DATA!r}: the session registers that itself", hint="choose another name")
            self._parts[DATA] = source
        turns = self._start(source)
        try:
            while True:
                batch = turns.next()
                if batch is None:
                    return
                if turns.current is Turn.TRAIN:
                    self.weight = source.weight(batch)
                turns.wiring.in_user_code = True
                yield batch
                if turns.current is not None:
                    raise FtarError(
                        "the loop asked for the next batch before session.step() was called for this one",
                        hint="call session.step(loss) once at the end of each turn",
                    )
        finally:
            turns.wiring.in_user_code = False
            if turns.over is None:
                turns.leave("the training loop was left before the job's last step", RankExit.RESTART)

    def step(self, loss: torch.Tensor | float | None = None, *, tokens: int = 0) -> None:
        """The gradients of this turn are there: reduce, wait for the commit, update. `loss` (for people) and `tokens`
        (of this replica's batch) are for the journal and status."""
        turns, turn = self._turns, None
        if turns is not None:
            turn, turns.current = turns.current, None
            turns.wiring.in_user_code = False
        if turns is None or turn is None:
            raise FtarError(
                "session.step() outside of a turn of session.batches()",
                hint="call it once at the end of each turn of the loop",
            )
        if turn is Turn.WARM_UP:
            self._taker.begin(Mode.DISCARD)
            return
        if turn is Turn.IDLE:
            turns.finish_step(None, 0, weight=0.0)
            return
        turns.finish_step(_number(loss), tokens, weight=None)

    # --- plain tensors, across the replicas

    @overload
    def allreduce(self, tensors: torch.Tensor, op: str = "sum") -> torch.Tensor: ...
    @overload
    def allreduce(self, tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]: ...
    def allreduce(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], op: str = "sum"
    ) -> torch.Tensor | list[torch.Tensor]:
        """Sum or mean of a tensor, or of each of a list, over the replicas that contribute to the running step; new
        tensors, the given ones stay as they are. Rank i of a replica reduces with rank i of the others.

        Between the beginning of a turn and its `step()`, by all replicas alike. All that go on have the same bits,
        whoever is lost meanwhile: with the values of the lost one if anybody had the result by then, else without. A
        turn without a batch of its own (`warming_up`) adds zeros and does not count in the mean; in a shadow's warm-up
        the result is what was given.

        Raises FtarError outside of a turn, for another dtype, and if another replica is about to do something else.
        """
        many = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        found = operate(many, kind_of(op), self._begun.operate) or [tensor.detach().clone() for tensor in many]
        return found[0] if isinstance(tensors, torch.Tensor) else found

    def broadcast(self, tensor: torch.Tensor, source: str = "") -> torch.Tensor:
        """The tensor of replica `source` (default: the first contributor that has a batch) on all contributors, bit
        for bit. Otherwise as `allreduce`. Raises FtarError if `source` does not contribute."""
        found = operate([tensor], Kind.BROADCAST, self._begun.operate, source)
        return found[0] if found else tensor.detach().clone()

    def barrier(self) -> None:
        """Returns when all contributors are here. Otherwise as `allreduce`."""
        barrier(self._begun.operate)

    def close(self) -> None:
        """Leave the job now (a loop that runs to its end does not need it)."""
        if self._turns is not None and self._turns.over is None:
            self._turns.leave("the session was closed", RankExit.RESTART)
        self._taker.close()

    # --- turns -----------------------------------------------------------------------------------------------------

    def _start(self, source: Source) -> Turns:
        if self._turns is not None:
            raise FtarError(
                "session.batches() was called twice", hint="one loop a session: a job has one sequence of steps"
            )
        wiring = Wiring(
            settings=self._settings,
            plan=self.plan,
            retained=self._taker.retained,
            reduced=self._taker.reduced,
            state_digest=f"{parameters_digest(self.model)}-{source.fingerprint()}",
            begin=source.begin(),
            last_step=self._last_step,
            journal=self._journal,
            options=self._link_options,
            stream_buffer_bytes=self._options.stream_buffer_bytes,
            end_grace_s=self._options.end_grace_s,
            first_steps=self._options.first_steps,
            first_steps_budget_s=self._options.first_steps_budget_s,
        )
        stepper = Stepper(
            wiring=wiring,
            taker=self._taker,
            plan=self.plan,
            model=self.model,
            optimizer=self.optimizer,
            parts=self._parts,
            update=self._update,
            source=source,
            journal=self._journal,
            ledger=self._ledger,
            snapshot_wait_s=self._options.snapshot_wait_s,
        )
        shadow = Shadow(
            wiring=wiring,
            stepper=stepper,
            plan=self.plan,
            parts=self._parts,
            warm_ups=self._options.warm_up_steps,
            journal=self._journal,
        )
        self._turns = Turns(
            wiring=wiring,
            stepper=stepper,
            shadow=shadow,
            taker=self._taker,
            journal=self._journal,
            ledger=self._ledger,
            model=self.model,
            optimizer=self.optimizer,
        )
        log.info("%s: %s", wiring.name, self.plan.describe())
        self._journal.write("data", source.describe())
        self._journal.write("retain", {"mode": self._retention.mode, "reason": self._retention.reason})
        wiring.start()
        return self._turns

    @property
    def _begun(self) -> Turns:
        if self._turns is None:
            raise FtarError("the session has not been started", hint="iterate over session.batches()")
        return self._turns

    def _default_update(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _bucket_full(self, bucket: int) -> None:
        passes("backward", self.current_step, bucket)
        self._begun.wiring.exchange.produced(bucket)


def _number(loss: torch.Tensor | float | None) -> float | None:
    if isinstance(loss, torch.Tensor):
        return float(loss.detach())
    return None if loss is None else float(loss)
