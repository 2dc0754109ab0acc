"""One step, from the last gradient to the update: wait for the reduction, say `Done`, wait for the commit, update.

This is the only place where parameters change, and `applied` says up to which step they have. A replica that catches up
goes through the same `_run_update` with the same bits in the same buffers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

import torch

from ftar_core.errors import NonFiniteGradients
from ftar_core.protocol.effects import End
from ftar_core.protocol.events import StepReduced
from ftar_core.protocol.sampler import NOTHING_DEALT
from ftar_core.runtime.breakpoints import passes
from ftar_core.training.corruption import Corruption
from ftar_core.training.data import Source
from ftar_core.training.digests import StepCheck
from ftar_core.training.exchange import News, Place, Role
from ftar_core.training.follow import ReplayStep
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.journal import Journal
from ftar_core.training.ledger import StepLedger
from ftar_core.training.plan import BucketPlan, BufferWatch
from ftar_core.training.rounds import Round, complete
from ftar_core.training.shelf import StepItem
from ftar_core.training.state import Stateful, look_at_state, raw_bytes
from ftar_core.training.statewire import StepData
from ftar_core.training.update import Update
from ftar_core.training.wiring import Wiring
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Commit, Deal, Verdict

if TYPE_CHECKING:  # torch's part of it takes a second to import, for those who have checkpoints
    from ftar_core.training.checkpoints.keeper import Keeper

log = logging.getLogger("ftar.session")
LOOK_S = 0.1  # while a shadow waits for something
WAIT_WORTH_TELLING_MS = 1.0
HOLD_S = 5.0  # so long the job holds before its state is worth a checkpoint


class Leave(Exception):
    """This replica cannot go on: it must tell the coordinator and end. A `__cause__` is the user's own exception."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


class Stepper:
    def __init__(
        self,
        *,
        wiring: Wiring,
        taker: GradientTaker,
        plan: BucketPlan,
        parts: Mapping[str, Stateful],
        update: Update,
        round_: Round | None,
        global_batch: int,
        source: Source,
        journal: Journal,
        ledger: StepLedger,
        snapshot_wait_s: float = 1.0,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._held_since: float | None = None
        self._snapshot_wait_s = snapshot_wait_s
        self.applied = 0  # the last step whose update has run
        self.contributors: tuple[str, ...] = ()  # of that step
        self._wiring, self._exchange, self._server = wiring, wiring.exchange, wiring.server
        self._taker, self._plan, self._update, self._round = taker, plan, update, round_
        self._parts, self._source, self._global_batch = parts, source, global_batch
        self._journal, self._ledger = journal, ledger
        self._buffers = BufferWatch(update.model)
        self.check = StepCheck(plan, taker, update, wiring.settings.rotation)
        wiring.parts = self.check.parts
        if wiring.breakpoints is not None:
            wiring.breakpoints.flip = Corruption(taker, update, self.check).flip
        self._replica = wiring.settings.replica
        self._batch: int | None = None
        self._deal = NOTHING_DEALT  # of the step whose results were announced
        self._began = 0.0
        self._life = 0  # of the member, when this step began

    def begin(self, place: Place) -> None:
        """Gradients from here on are those of `place.step`. Raises Leave."""
        self._batch = place.deal.batches.get(self._replica)
        if place.deal.limit != self._source.total:
            job, here = (str(limit) if limit else "any number of" for limit in (place.deal.limit, self._source.total))
            reason = f"the job trains {job} batches of the data, this replica {here}: start it with the same passes"
            raise Leave(reason, RankExit.REFUSED)
        if place.deal.round != self._global_batch:
            job, here = (f"{n} batches" if n else "one step" for n in (place.deal.round, self._global_batch))
            reason = f"an update of the job is of {job}, of this replica {here}: start it with the same global_batch"
            raise Leave(reason, RankExit.REFUSED)
        self._source.stands_at(place.deal)
        self._life = place.life
        self._taker.begin(Mode.TAKE)  # first: what is left of the step before must not count in this one
        self._exchange.begin(place)
        self._buffers.remember()
        self._wiring.begin_step(place.step)
        self._began = time.monotonic()
        passes("forward", place.step)

    def finish(self, loss: float | None, tokens: int, *, weight: float | None) -> End | None:
        """All gradients of the step are there: reduce, wait for the commit, update. Returns the end of the member if
        that came instead; returns without an update, too, if this replica has become a shadow. Raises Leave."""
        step = self.applied + 1
        self._buffers.check()
        produced = time.monotonic()
        self._wiring.phase(Phase.REDUCE, step)
        self._taker.finish(tokens=float(tokens), loss=loss, weight=weight)
        self.check.begin(step)
        self._taker.measure()
        announced: EpochId | None = None
        reduced = math.nan
        while True:
            self._hold_checkpoint()
            self.serve_shadows(waited_s=time.monotonic() - produced)
            self._exchange.watch_buckets = self.check.eager and announced is None
            news = self._exchange.wait(LOOK_S if self._server.wanted() else 1.0)
            if news is News.BUCKET:
                so_far, buckets = self._exchange.reduced_so_far()
                if so_far is not None:
                    self.check.look(so_far, buckets)
            elif news is News.REDUCED:
                epoch = self._exchange.reduced_epoch()
                passes("reduced", step)
                if epoch is not None and self._announce(step, epoch, loss, produced):
                    announced, reduced = epoch, time.monotonic()
            elif news is News.COMMIT:
                break
            elif news is News.END:
                return self._exchange.ended()
            elif news is News.ROLE:
                place = self._exchange.place()
                if place.life != self._life:
                    return None  # put out meanwhile: nothing of this step counts
                if self._exchange.void:
                    log.warning("step %d is reduced again without its gradients: the batch is run again", step)
                    self._journal.write("recompute", {"step": step})
                    return None
                if place.role is not Role.CONTRIBUTOR or place.deal.batches.get(self._replica) != self._batch:
                    return None  # out of step with the others, or dealt anew: the next turn begins again
        retries, order = self._exchange.take_commit()
        commit = order.commit.whole()
        if commit.step != step or commit.epoch != announced:
            raise Leave(f"the results of step {step} here are not those that were committed", RankExit.RESTART)
        committed = time.monotonic()
        if commit.verdict is Verdict.FAIL:
            self._fail(step)
        mean_loss = order.loss if order.loss is not None else self._taker.mean_loss
        total_tokens = int(self._taker.total_tokens)
        self._apply(commit)
        self._ledger.step(
            commit,
            batches={name: batch for name, batch in self._deal.batches.items() if name in commit.contributors},
            incarnation=self._wiring.incarnation,
            began=self._began,
            produced=produced,
            reduced=reduced,
            committed=committed,
            updated=time.monotonic(),
            retries=retries,
            loss=mean_loss,
            tokens=total_tokens,
        )
        return None

    def _announce(self, step: int, epoch: EpochId, loss: float | None, produced: float) -> bool:
        """Tell the coordinator that the step is reduced here. False if the epoch has changed meanwhile."""
        place = self._exchange.place()
        digest, state, finite = self.check.result(epoch)
        now = time.monotonic()
        event = StepReduced(
            step=step,
            epoch=epoch,
            digest=digest,
            state=state,
            norm=self._taker.own_norm,
            finite=finite,
            own_finite=finite or self._taker.inputs_finite(),
            loss=loss if loss is not None and math.isfinite(loss) else None,
            step_ms=(now - self._began) * 1000.0,
            wait_ms=(now - produced) * 1000.0,
            produced_at=produced,
            weight=self._taker.total_weight,
            mean_loss=self._taker.mean_loss,
            loss_weight=self._taker.loss_weight,
        )
        told = self._exchange.take_reduced(epoch, lambda: self._wiring.post(event))
        if told:
            self._deal = place.deal  # nobody deals a step anew within an epoch
            self._wiring.phase(Phase.COMMIT, step)
        return told

    def _fail(self, step: int) -> NoReturn:
        reason = f"the gradients of step {step} were not finite, and the job was told to fail then"
        hint = f"the state here is that after step {step - 1}; the coordinator's events say whose gradients they were"
        raise Leave(reason, RankExit.FAILED) from NonFiniteGradients(reason, hint=hint)

    def _apply(self, commit: Commit) -> None:
        """The step is true: the same on every replica from here on."""
        self._settle_copy(commit.step - 1)
        if commit.verdict is Verdict.APPLY and self._round is None:
            self._taker.average()
        if self._server.followed():
            self._server.publish(self._step_item(commit))
        if commit.verdict is Verdict.SKIP:
            log.warning("step %d: gradients were not finite somewhere, nobody updates", commit.step)
        self._change(commit.step, commit.verdict, commit.contributors, commit.deal)
        self.applied = commit.step
        passes("updated", commit.step)
        self._source.stands_at(commit.deal)
        self._taker.begin(Mode.OFF)
        if self._keeper is not None:
            self._keeper.stepped(commit, self._round is None or complete(commit.deal))
        self.serve_shadows(behind_update=True)

    def _hold_checkpoint(self) -> None:
        """A job that stands may end where it stands (`--hold-exit`): its state is on disk before."""
        if self._keeper is None:
            return
        if not self._exchange.place().holding:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = time.monotonic()
        elif time.monotonic() - self._held_since > HOLD_S:
            self._keeper.holds(self.applied)

    def _settle_copy(self, step: int) -> None:
        """No copy of the state reads it any more."""
        began = time.monotonic()
        abandoned = self._server.settle(began - self._began, self._snapshot_wait_s)
        waited_ms = (time.monotonic() - began) * 1000.0
        if abandoned or waited_ms > WAIT_WORTH_TELLING_MS:
            self._journal.write("snapshot", {"step": step, "abandoned": abandoned, "update_waited_ms": waited_ms})
        if abandoned:
            log.info("%s", abandoned)

    def _change(self, step: int, verdict: Verdict, contributors: tuple[str, ...], following: Deal) -> None:
        """What a committed step does to the state; the same when it is replayed. The results are in their buffers:
        averages, or sums where an update takes several steps."""
        self.contributors = contributors
        if verdict is Verdict.SKIP:
            if self._round is not None:
                self._round.drop()
            self._in_user_code(step, lambda: self._update.skip(contributors))
            return
        if self._round is not None:
            self._round.add(self._taker.reduced)
            if not complete(following) or not self._round.take(self._taker.reduced):
                return
            self._taker.average()
        self._run_update(step, contributors)

    def _step_item(self, commit: Commit) -> StepItem:
        """A copy of the buckets for followers. Cost: a memory copy of the gradients, while somebody
        follows."""
        buckets: tuple[torch.Tensor, ...] = ()
        if commit.verdict is Verdict.APPLY:
            buckets = self._server.step_memory(tuple(self._taker.reduced))
            for mine, theirs in zip(buckets, self._taker.reduced, strict=True):
                mine.copy_(theirs)
        header = StepData(
            step=commit.step,
            epoch=commit.epoch,
            verdict=commit.verdict,
            contributors=commit.contributors,
            sizes=tuple(bucket.numel() * bucket.element_size() for bucket in buckets),
            deal=commit.deal,
        )
        return StepItem(header, buckets)

    def _run_update(self, step: int, contributors: tuple[str, ...]) -> None:
        self._wiring.phase(Phase.UPDATE, step)
        passes("update", step)
        self._taker.mode = Mode.OFF
        self._taker.give_back()
        self._in_user_code(step, lambda: self._update.run(contributors))

    def _in_user_code(self, step: int, work: Callable[[], None]) -> None:
        self._wiring.in_user_code = self._wiring.updating = True
        try:
            work()
        except Exception as error:
            # Half an update may have run: this state is nobody's, and only catch-up can replace it.
            reason = f"the update of step {step} raised {type(error).__name__}: {error}"
            raise Leave(reason, RankExit.RESTART) from error
        finally:
            self._wiring.in_user_code = self._wiring.updating = False

    def replay(self, item: ReplayStep) -> None:
        """Apply a step that others have committed, exactly as they did. Raises Leave."""
        began = time.monotonic()
        passes("replay", item.step)
        self._taker.begin(Mode.OFF)
        if item.verdict is Verdict.APPLY:
            self._taker.results_free()
            self._wiring.quiet()
            for mine, theirs in zip(self._taker.reduced, item.buckets, strict=True):
                if mine.device.type == "cpu":
                    raw_bytes(mine)[:] = raw_bytes(theirs)
                else:
                    mine.copy_(theirs)
        mean_loss, total_tokens = self._taker.mean_loss, int(self._taker.total_tokens)
        following = item.deal if item.deal is not None else NOTHING_DEALT
        self._change(item.step, item.verdict, item.contributors, following)
        self._taker.begin(Mode.OFF)
        if item.deal is not None:
            self._source.stands_at(item.deal)
        if self._keeper is not None:
            self._keeper.replayed(item.step, self._round is None or complete(following))
        self._ledger.replayed(
            step=item.step,
            epoch=item.epoch,
            verdict=item.verdict,
            contributors=item.contributors,
            incarnation=self._wiring.incarnation,
            began=began,
            updated=time.monotonic(),
            loss=mean_loss,
            tokens=total_tokens,
        )

    def serve_shadows(self, *, behind_update: bool = False, waited_s: float = 0.0) -> None:
        """Begin a copy of the state after `applied` for shadows that wait for one; it is made beside the training."""
        if not self._server.wanted():
            return
        epoch = self._exchange.place().last_commit_epoch
        live = lambda: look_at_state(self._parts, places=self._keeper is not None)  # noqa: E731
        self._server.look(self.applied, epoch, live, behind_update=behind_update, waited_s=waited_s)
