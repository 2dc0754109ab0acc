"""Which turn of the loop comes next, and how the loop ends.

The loop of a contributor runs a turn a step. Steps without a batch for this replica, and all of catch-up but its
warm-ups, happen inside of `next`, unseen by the user's code. What ends a member (the job's last commit, a drain, an
eviction, an exception, a loop that is left) is carried out here, once, in one order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

import torch

from ftar_core.errors import FtarError
from ftar_core.protocol.effects import End
from ftar_core.protocol.events import LeaveNow
from ftar_core.training.exchange import Place, Role
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.journal import Journal
from ftar_core.training.ledger import StepLedger
from ftar_core.training.lockstep import Do
from ftar_core.training.operations import Operation
from ftar_core.training.shadow import Shadow
from ftar_core.training.state import parameters_digest
from ftar_core.training.stepping import Leave, Stepper
from ftar_core.training.update import Update
from ftar_core.training.wiring import Wiring
from ftar_core.wire.exits import RankExit

if TYPE_CHECKING:
    from ftar_core.training.checkpoints.keeper import Keeper

log = logging.getLogger("ftar.session")

LEAVE_S = 2.0  # for the coordinator to hear that this replica leaves


class Turn(Enum):
    TRAIN = "train"
    WARM_UP = "warm-up"  # of a shadow: its gradients are dropped
    IDLE = "idle"  # of a contributor without a batch, for the sake of plain operations: its gradients are dropped


class Turns:
    """The turns of one session's loop, from its start to its end. All calls are the training thread's."""

    def __init__(
        self,
        *,
        wiring: Wiring,
        stepper: Stepper,
        shadow: Shadow,
        taker: GradientTaker,
        journal: Journal,
        ledger: StepLedger,
        update: Update,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        self.wiring, self.stepper = wiring, stepper
        self.current: Turn | None = None
        self.over: End | None = None
        self._shadow, self._taker = shadow, taker
        self._journal, self._ledger = journal, ledger
        self._update = update
        self._contributes = False  # and will until it ends
        self._operates = False  # the loop's body has plain operations
        self._turned = False  # the loop's body has been run

    @property
    def step(self) -> int:
        """The step that is being worked on; the first is 1."""
        return self.stepper.applied + 1

    def next(self) -> int | None:
        """The batch number for the user's next turn; None when the job is over. Steps without a batch for this replica,
        and catch-up, happen inside."""
        exchange, stepper = self.wiring.exchange, self.stepper
        while self.over is None:
            end = exchange.ended()
            if end is not None:
                self._finish(end)
                return None
            place = exchange.place()
            self._report(place)
            in_step = place.role is Role.CONTRIBUTOR and stepper.applied == place.step - 1
            self._contributes = self._contributes and in_step
            if self._contributes and not place.stopping:
                with self._leaving():
                    self._shadow.contributing(place)
                    stepper.begin(place)
                batch = place.deal.batches.get(self.wiring.settings.replica)
                if batch is not None:
                    return self._turn(Turn.TRAIN, batch)
                if self._operates or not self._turned:
                    # The others may operate in their turns, and wait for this replica.
                    self._taker.begin(Mode.ZERO)
                    return self._turn(Turn.IDLE, self._some_batch(place))
                self.finish_step(None, 0, weight=0.0)
            elif place.stopping:
                exchange.wait(1.0)
            else:
                with self._leaving():
                    doing = self._shadow.turn(place)
                if doing is Do.CONTRIBUTE:
                    self._contributes = True
                elif doing is Do.WARM_UP:
                    self._taker.begin(Mode.DISCARD)
                    return self._turn(Turn.WARM_UP, self._some_batch(place))
        return None

    def _turn(self, turn: Turn, batch: int) -> int:
        self.current, self._turned = turn, True
        return batch

    def _some_batch(self, place: Place) -> int:
        """For a turn whose gradients are dropped."""
        return self.stepper.applied % place.deal.limit if place.deal.limit else self.stepper.applied

    def operate(self, operation: Operation) -> torch.Tensor | None:
        """A plain operation with the other contributors: its result; None where there are none for this turn. Raises
        FtarError, or SystemExit if the member has ended."""
        if self.wiring.updating:
            raise FtarError(
                "a plain operation in the update: a replica that catches up could not replay it",
                hint="call it before session.step()",
            )
        if self.current is None:
            raise FtarError(
                "a plain operation outside of a turn of the loop",
                hint="call it between the beginning of a turn and its session.step()",
            )
        if not self._taker.retained.keeps:
            raise FtarError(
                "a plain operation where gradients are recomputed: the others would not make it twice",
                hint="set TrainingOptions.retain to host, or give retention more memory",
            )
        self._operates = True
        if self.current is Turn.WARM_UP:
            return None
        exchange = self.wiring.exchange
        self._taker.before_operation()
        self.wiring.in_user_code = False
        try:
            result = exchange.operations.run(operation)
        finally:
            self.wiring.in_user_code = True
        end = exchange.ended()
        if result is None and end is not None:
            self._finish(end)
            raise SystemExit(int(end.exit_code))
        return result

    def finish_step(self, loss: float | None, tokens: int, *, weight: float | None) -> None:
        """Reduce, wait for the commit, update."""
        with self._leaving():
            end = self.stepper.finish(loss, tokens, weight=weight)
        if end is not None:
            self._finish(end)

    def leave(self, reason: str, exit_code: int) -> None:
        """Tell the coordinator why, wait a moment until it has heard, end."""
        exchange = self.wiring.exchange
        self.wiring.post(LeaveNow(reason, exit_code))
        deadline = time.monotonic() + LEAVE_S
        while exchange.ended() is None and time.monotonic() < deadline:
            exchange.drop_commits()
            exchange.wait(0.05)
        self._shut_down(End(exit_code, reason))

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Carry a Leave out: tell the coordinator, end, then let the user's own exception or SystemExit through."""
        try:
            yield
        except Leave as leave:
            self.leave(leave.reason, leave.exit_code)
            if leave.__cause__ is not None:
                raise leave.__cause__ from None
            raise SystemExit(int(leave.exit_code)) from None

    def _report(self, place: Place) -> None:
        state = "starting"
        if place.holding:
            state = "blocked"
        elif self._shadow.state is not None:
            state = self._shadow.state
        elif place.role is Role.CONTRIBUTOR:
            state = "contributing"
        epoch = place.epoch.id if place.epoch is not None else place.last_commit_epoch
        self.wiring.reporter.update(
            state=state,
            step=self.step,
            term=epoch.term.number,
            epoch=epoch.number,
            contributors=place.epoch.names() if place.epoch is not None else self.stepper.contributors,
            last_stall_ms=self._ledger.stall_ms,
            tokens_per_s=self._ledger.tokens_per_s,
            loss=self._ledger.loss,
            compute_ms=self._ledger.compute_ms,
            wait_ms=self._ledger.wait_ms,
        )

    def _finish(self, end: End) -> None:
        """The member has ended. Returns after the job's regular end, else raises SystemExit."""
        self._shut_down(end)
        if end.exit_code != RankExit.FINISHED:
            raise SystemExit(int(end.exit_code))

    def _shut_down(self, end: End) -> None:
        self.over = end
        self.current = None
        applied = self.stepper.applied
        level = logging.INFO if end.exit_code == RankExit.FINISHED else logging.WARNING
        text = "%s ends after step %d (exit code %d): %s"
        log.log(level, text, self.wiring.name, applied, end.exit_code, end.reason)
        self._shadow.close()
        if self._keeper is not None:
            self._keeper.finish(wait=end.exit_code == RankExit.FINISHED)
        self.wiring.close()
        self._taker.close()
        self._ledger.ended(
            step=applied,
            exit_code=int(end.exit_code),
            reason=end.reason,
            incarnation=self.wiring.incarnation,
            params_digest=parameters_digest(self._update.model),
            optimizer_digest=self._update.digest(),
        )
        self._journal.close()
