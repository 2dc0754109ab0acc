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
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import nn

from ftar_core.errors import FtarError, SettingsError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.settings import Settings, read_settings
from ftar_core.runtime.settings import data_plane as checked_data_plane
from ftar_core.training import current
from ftar_core.training.checkpoints.options import Checkpoint
from ftar_core.training.data import BatchSampler, Source
from ftar_core.training.devices import Lane, host_memory, lanes_of
from ftar_core.training.feed import open_feed
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.journal import Journal
from ftar_core.training.ledger import StepLedger
from ftar_core.training.memories import Memory, memory_for
from ftar_core.training.operations import Operation
from ftar_core.training.options import TrainingOptions
from ftar_core.training.plain import PlainTensors
from ftar_core.training.plan import make_plan
from ftar_core.training.refusals import refuse
from ftar_core.training.retention import Host, Inputs, inputs_for
from ftar_core.training.rounds import Round
from ftar_core.training.shadow import Shadow
from ftar_core.training.state import Stateful, check_transferable, parameters_digest
from ftar_core.training.stepping import Stepper
from ftar_core.training.turns import Turn, Turns
from ftar_core.training.update import Many, Update
from ftar_core.training.wiring import Wiring
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.messages import Deal

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ftar_core.native._core import Options
    from ftar_core.training.checkpoints.keeper import Keeper
    from ftar_core.training.checkpoints.restoring import Restorer
    from ftar_core.training.nccl.plane import Parts
    from ftar_core.training.stream import Stream

log = logging.getLogger("ftar.session")

T = TypeVar("T")
PHASES = {"checkpoint": Phase.CHECKPOINT, "evaluation": Phase.EVALUATION, "compile": Phase.COMPILE}
DATA = "data"  # the name of the data among the registered state


class Session(PlainTensors):
    """One replica's part in a job.

    `model`, `optimizer` and `scheduler`: one, or a list or mapping of several, which all make their step together.
    `update`: called with reduced gradients in `.grad`; by default clips to `max_norm` (of all gradients together, over
    all ranks of the replica), steps optimizers, schedulers, and clears gradients. It must read nothing else but models,
    optimizers, schedulers, `session.contributors` and what is registered in `state` (name -> object with state_dict and
    load_state_dict). `skipped`: called instead where gradients were not finite on some replica, under the same rule.
    `scaler`: a torch.amp.GradScaler for float16; its scale is lowered on all replicas when a step is skipped, and the
    default update unscales. `lr_scale`: a factor to the learning rates of an update, of the share of `replicas` that
    contributed to it. `global_batch`: an update is of so many batches, in as many steps as that takes (rounds.py).
    `last_step`: end the job after this step (0: no wish). `checkpoint`: where the state is kept for the day when all
    replicas die, and how often (checkpoints/options.py); a job that has lost its state goes on from there.
    `data_plane`: what moves gradients between replicas, "host" (our links) or "nccl" (training/nccl/plane.py; GPUs
    only), the same on all of them; instead of FTAR_DATA_PLANE. `settings`: instead of the environment.

    Raises SettingsError (environment), PlanMismatch (a model that cannot be trained this way), StateMismatch (state
    that cannot be sent to another replica). Starts threads and sockets at the first turn of `batches`, not before."""

    def __init__(
        self,
        model: Many[nn.Module],
        optimizer: Many[torch.optim.Optimizer],
        *,
        update: Callable[[], None] | None = None,
        scheduler: Many[torch.optim.lr_scheduler.LRScheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        skipped: Callable[[], None] | None = None,
        max_norm: float | None = None,
        lr_scale: Callable[[float], float] | None = None,
        replicas: int = 0,
        global_batch: int = 0,
        state: Mapping[str, Stateful] | None = None,
        last_step: int = 0,
        checkpoint: Checkpoint | None = None,
        data_plane: str | None = None,
        settings: Settings | None = None,
        options: TrainingOptions | None = None,
        link_options: Options | None = None,
    ) -> None:
        if last_step < 0:
            raise SettingsError(f"last_step={last_step}: a step number, or 0 for no end, is expected")
        if global_batch < 0 or (global_batch and lr_scale is not None):
            raise SettingsError(
                f"global_batch={global_batch}" + (" and lr_scale" if lr_scale is not None else ""),
                hint="a number of batches (0: every step is an update); with it there is no share to scale by",
            )
        self._settings = settings if settings is not None else read_settings()
        if data_plane is not None:
            self._settings = replace(self._settings, data_plane=checked_data_plane(data_plane))
        self._options = options if options is not None else TrainingOptions()
        self._link_options = link_options
        self._last_step = last_step
        self._checkpoint = checkpoint
        refuse(_each(model), _each(optimizer), self._settings)
        self._update = Update(
            models=model,
            optimizers=optimizer,
            schedulers=scheduler,
            scaler=scaler,
            update=update,
            skipped=skipped,
            max_norm=max_norm,
            lr_scale=lr_scale,
            replicas=replicas,
        )
        self._global_batch = global_batch
        self._round = Round() if global_batch else None
        self.model = self._update.model
        parts = self._update.parts()
        if self._round is not None:
            parts["round"] = self._round
        for name, part in (state or {}).items():
            if name in parts:
                raise SettingsError(f"state {name!r}: the session registers that itself", hint="choose another name")
            parts[name] = part
        self._parts = parts
        check_transferable(parts)
        self.plan = make_plan(self.model, self._options.bucket_bytes, self._options.reduce_dtype)
        lanes = lanes_of(self.model.parameters())
        memory = self._memory(lanes)
        inputs = self._inputs(host_memory(lanes), memory)
        self._taker = GradientTaker(self.model, self.plan, self._bucket_full, inputs, lanes, memory=memory)
        self._journal = Journal(self._settings.journal, self._settings.replica, self._settings.rank)
        self._ledger = StepLedger(self._journal)
        self._turns: Turns | None = None  # once the loop has begun
        current.made(self)

    def _memory(self, lanes: dict[torch.device, Lane]) -> Memory:
        """Where gradients are reduced by our own ring."""
        place = self._options.reduce or self._settings.reduce
        if self._settings.data_plane == "nccl" and place != "host":
            raise SettingsError(
                f"FTAR_REDUCE={place} with data_plane='nccl': NCCL adds up where it likes",
                hint="unset FTAR_REDUCE, or use data_plane='host'",
            )
        return memory_for(place, self.plan, lanes)

    def _inputs(self, host: Host, memory: Memory) -> Inputs:
        """Memory for the gradients of a step."""
        options = self._options
        self._nccl: Parts | None = None
        if self._settings.data_plane == "nccl":
            from ftar_core.training.nccl.choice import nccl_parts

            self._nccl, there, self._retention = nccl_parts(self.model, self.plan, self._settings, options, host)
            self._settings = replace(self._settings, nccl=self._nccl.library.version_text)
            return there
        inputs, self._retention = inputs_for(
            self.model,
            self.plan,
            options.retain,
            options.retain_bytes,
            self._settings.world_size,
            host=host,
            memory=memory,
        )
        return inputs

    # --- for the user's loop ---------------------------------------------------------------------------------------

    @property
    def replica(self) -> str:
        return self._settings.replica

    @property
    def started(self) -> bool:
        """The loop has begun."""
        return self._turns is not None

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
        """Replicas that contributed to the last committed step; in the update, to the one that it is of."""
        return self._turns.stepper.contributors if self._turns is not None else ()

    @property
    def warming_up(self) -> bool:
        """The gradients of this turn of the loop are dropped, and its loss says nothing: it is a shadow's warm-up, or
        was not dealt a batch and only takes part in the plain operations of the others."""
        return self._turns is not None and self._turns.current in (Turn.WARM_UP, Turn.IDLE)

    @property
    def mean_loss(self) -> float | None:
        """Loss of the last committed step, averaged over the contributors by weight, and over the ranks of a replica
        (the same on all of them)."""
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

        def initial() -> tuple[str, Deal]:
            begin = msgspec.structs.replace(source.begin(), round=self._global_batch)
            return f"{parameters_digest(self.model)}-{source.fingerprint()}", begin

        wiring = Wiring(
            settings=self._settings,
            plan=self.plan,
            memory=self._taker.memory,
            retained=self._taker.retained,
            reduced=self._taker.reduced,
            state_digest=initial()[0],
            begin=initial()[1],
            last_step=self._last_step,
            journal=self._journal,
            options=self._link_options,
            stream_buffer_bytes=self._options.stream_buffer_bytes,
            end_grace_s=self._options.end_grace_s,
            first_steps=self._options.first_steps,
            first_steps_budget_s=self._options.first_steps_budget_s,
            restores=self._checkpoint is not None,
            checkpoint_s=self._checkpoint.seconds if self._checkpoint is not None else 0.0,
            nccl=self._nccl,
        )
        keeper, restorer = self._checkpoints(wiring)
        stepper = Stepper(
            wiring=wiring,
            taker=self._taker,
            plan=self.plan,
            parts=self._parts,
            update=self._update,
            round_=self._round,
            global_batch=self._global_batch,
            source=source,
            journal=self._journal,
            ledger=self._ledger,
            snapshot_wait_s=self._options.snapshot_wait_s,
            keeper=keeper,
        )
        shadow = Shadow(
            wiring=wiring,
            stepper=stepper,
            plan=self.plan,
            parts=self._parts,
            warm_ups=self._options.warm_up_steps,
            journal=self._journal,
            restorer=restorer,
            keeper=keeper,
            initial=initial,
        )
        self._turns = Turns(
            wiring=wiring,
            stepper=stepper,
            shadow=shadow,
            taker=self._taker,
            journal=self._journal,
            ledger=self._ledger,
            update=self._update,
            keeper=keeper,
        )
        log.info("%s: %s", wiring.name, self.plan.describe())
        self._journal.write("data", source.describe())
        self._journal.write("retain", {"mode": self._retention.mode, "reason": self._retention.reason})
        wiring.start()
        return self._turns

    def _checkpoints(self, wiring: Wiring) -> tuple[Keeper | None, Restorer | None]:
        options = self._checkpoint
        if options is None:
            return None, None
        from ftar_core.training.checkpoints.keeper import Keeper
        from ftar_core.training.checkpoints.restoring import Restorer

        names = self._update.parameter_names()
        keeper = Keeper(
            options,
            settings=self._settings,
            shelf=wiring.server.shelf,
            names=names,
            here=lambda: wiring.exchange.place().epoch,
            incarnation=lambda: wiring.incarnation,
            tell=wiring.runtime.tell,
            journal=self._journal,
        )
        return keeper, Restorer(options, parts=self._parts, names=names, journal=self._journal)

    def _operate(self, operation: Operation) -> torch.Tensor | None:
        return self._begun.operate(operation)

    @property
    def _begun(self) -> Turns:
        if self._turns is None:
            raise FtarError("the session has not been started", hint="iterate over session.batches()")
        return self._turns

    def _bucket_full(self, bucket: int) -> None:
        passes("backward", self.current_step, bucket)
        self._begun.wiring.exchange.produced(bucket)


def _each(given: object) -> list[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def _number(loss: torch.Tensor | float | None) -> float | None:
    if isinstance(loss, torch.Tensor):
        return float(loss.detach())
    return None if loss is None else float(loss)
