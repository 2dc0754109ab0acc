"""Turns of a replica that does not contribute yet: one piece of catching up, a warm-up, or a wait, the same on all of
its ranks (lockstep.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from ftar_core.errors import CheckpointError, StateMismatch
from ftar_core.protocol.events import Restored, ShadowAt
from ftar_core.runtime.breakpoints import passes
from ftar_core.training.catchup import CatchUp
from ftar_core.training.checkpoints.options import problem_with
from ftar_core.training.dial import Identity
from ftar_core.training.exchange import Place, Role
from ftar_core.training.journal import Journal
from ftar_core.training.lockstep import LOOK_S, Do, conclude
from ftar_core.training.plan import BucketPlan
from ftar_core.training.state import Stateful
from ftar_core.training.stepping import Leave, Stepper
from ftar_core.training.wiring import Wiring
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.messages import Deal
from ftar_core.wire.team import Ballot

if TYPE_CHECKING:
    from ftar_core.training.checkpoints.keeper import Keeper
    from ftar_core.training.checkpoints.restoring import Restorer

log = logging.getLogger("ftar.session")

JOIN_GRACE_S = 1.0  # a joining replica whose source changes rails; longer, and everybody waits for it


class Shadow:
    def __init__(
        self,
        *,
        wiring: Wiring,
        stepper: Stepper,
        plan: BucketPlan,
        parts: Mapping[str, Stateful],
        warm_ups: int,
        journal: Journal,
        restorer: Restorer | None = None,
        keeper: Keeper | None = None,
        initial: Callable[[], tuple[str, Deal]] | None = None,
    ) -> None:
        """`initial`: digest of the state that is here, and from where its data goes on."""
        self._restorer, self._keeper, self._initial = restorer, keeper, initial
        self._wiring, self._stepper, self._plan, self._parts = wiring, stepper, plan, parts
        self._warm_ups, self._journal = warm_ups, journal
        self._holds_state = False  # a state of this job, not just this process's own beginning
        self._catch_up: CatchUp | None = None
        self._begins = 0  # the history of a job that begins with what is here now (checkpoints/histories.py)
        self._inside = False  # contributes, and has said so to the checkpoints
        self._lost_since: float | None = None
        self._life = self._forgot = 0

    @property
    def state(self) -> str | None:
        """A replica state of `ftctl status`; None while this replica is no shadow."""
        return self._catch_up.state if self._catch_up is not None else None

    def contributing(self, place: Place) -> None:
        """This replica begins a step as a contributor. Raises Leave."""
        if self._keeper is not None and not self._inside:
            try:
                self._keeper.enter(self._begins if self._catch_up is None else 0)
            except (CheckpointError, OSError) as error:
                raise Leave(problem_with(self._keeper.options, error), RankExit.REFUSED) from None
        catch_up, self._catch_up = self._catch_up, None
        self._begins, self._inside = 0, True
        self._holds_state, self._warm_ups = True, 0  # the loop's body runs here from now on
        self._wiring.server.serve(True)
        if catch_up is not None:
            passes("promote", place.step)
            catch_up.close()
            self._lost_since = None
            # Once more, now that this member is in the epoch: the state before its first step is really here.
            self._wiring.post(ShadowAt(self._stepper.applied, place.last_commit_epoch, True, "contributing"))
            log.info("%s contributes from step %d on", self._wiring.settings.replica, place.step)

    def turn(self, place: Place) -> Do:
        """One piece of work, or a short wait. WARM_UP: run the user's loop body once. CONTRIBUTE: begin the step that
        `place` names, or a later look at it. Raises Leave."""
        ballots = self._ballots(place)
        if not ballots:
            return Do.WAIT  # the end
        doing = conclude(ballots)
        try:
            if doing is Do.RESTORE:
                self._restore()
                return Do.WAIT
            self._act(doing, place)
        except (StateMismatch, CheckpointError) as error:
            raise Leave(str(error) + (f" ({error.hint})" if error.hint else ""), RankExit.REFUSED) from None
        catch_up = self._catch_up
        if catch_up is not None and catch_up.step >= 0:
            self._stepper.applied, self._holds_state = catch_up.step, True
        if doing in (Do.WAIT, Do.FOLLOW):
            if catch_up is not None and place.role is Role.CONTRIBUTOR and not self._can_wait(catch_up):
                text = f"lost the stream before step {place.step - 1} arrived ({catch_up.text})"
                raise Leave(text, RankExit.RESTART)
            self._wiring.exchange.wait(1.0 if place.role is Role.NEW else LOOK_S)
        return doing

    def _ballots(self, place: Place) -> tuple[Ballot, ...]:
        """Of all ranks; empty if the replica ends."""
        self._keep_or_forget(place)
        joins_at = place.step if place.role is Role.CONTRIBUTOR else 0
        mine = Ballot(self._stepper.applied, joins_at=joins_at)
        if place.role is Role.NEW:
            self._wiring.phase(Phase.STARTUP, self._stepper.applied + 1)
        elif place.role is Role.SHADOW or self._catch_up is not None or self._stepper.applied != place.step - 1:
            catch_up = self._catching_up(place)
            self._wiring.phase(Phase.CATCHUP, max(catch_up.step, 0))
            mine = msgspec.structs.replace(catch_up.ballot(), joins_at=joins_at)
        if place.restore and self._restorer is not None and place.role is Role.NEW:
            mine = msgspec.structs.replace(mine, restores=True)
        return self._wiring.agree(mine)

    def _restore(self) -> None:
        """All ranks of the replica together."""
        self._wiring.exchange.take_restore()
        if self._restorer is None or self._initial is None:
            return
        self._wiring.phase(Phase.CHECKPOINT, self._stepper.applied + 1)
        step = self._restorer.run(self._wiring.agree)
        if step is not None:
            self._stepper.applied = step
            self._begins, self._inside = self._restorer.history, False
            digest, deal = self._initial()
            self._wiring.post(Restored(step, digest, deal))

    def _keep_or_forget(self, place: Place) -> None:
        """A new life begins with its own sources, and perhaps without the state of the one before."""
        if (place.life, place.forget) == (self._life, self._forgot):
            return
        if place.forget != self._forgot:
            self._holds_state = False
        self._life, self._forgot = place.life, place.forget
        if self._catch_up is not None:
            self._warm_ups = self._catch_up.warm_ups_left
            self.close()

    def _catching_up(self, place: Place) -> CatchUp:
        if self._catch_up is None:
            self._wiring.server.serve(False)
            self._catch_up, self._inside = self._begin(place), False
        catch_up = self._catch_up
        if place.role is not Role.CONTRIBUTOR:
            catch_up.set_sources(self._wiring.exchange.sources())
            catch_up.set_rate(self._wiring.exchange.catchup_mbit)
        if catch_up.refused:
            raise Leave(catch_up.refused, RankExit.REFUSED)
        return catch_up

    def _act(self, doing: Do, place: Place) -> None:
        catch_up = self._catch_up
        if catch_up is None:
            return
        if doing in (Do.LOAD, Do.REPLAY):
            catch_up.apply_front()
        elif doing is Do.WARM_UP:
            catch_up.warm_up()
        elif doing is Do.FOLLOW:
            catch_up.follow()
        elif doing is Do.WAIT:
            catch_up.wait()
        elif doing is Do.RESTART:
            log.info("the ranks of %s hold different steps: all fetch anew", self._wiring.settings.replica)
            self._warm_ups, self._holds_state = catch_up.warm_ups_left, False
            catch_up.close()
            self._catch_up = self._begin(place)

    def _can_wait(self, catch_up: CatchUp) -> bool:
        """Everybody waits for a replica that has joined: it may look for its stream for a moment only."""
        if catch_up.connected:
            self._lost_since = None
            return True
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        return now - self._lost_since < JOIN_GRACE_S

    def _begin(self, place: Place) -> CatchUp:
        settings, post = self._wiring.settings, self._wiring.post
        return CatchUp(
            identity=Identity(settings.job, settings.token, settings.replica, self._wiring.incarnation, settings.rank),
            plan=self._plan,
            rails=settings.rails,
            sources=self._wiring.exchange.sources(),
            have=self._stepper.applied if self._holds_state else -1,
            epoch=place.last_commit_epoch,
            warm_ups=self._warm_ups,
            buffer_bytes=self._wiring.replay_buffer_bytes,
            spread=settings.mode == "stripe",
            journal=self._journal,
            parts=self._parts,
            replay=self._stepper.replay,
            tell=lambda step, epoch, ready, text, notice: post(ShadowAt(step, epoch, ready, text, notice)),
            on_news=self._wiring.exchange.poke,
        )

    def close(self) -> None:
        if self._catch_up is not None:
            self._catch_up.close()
            self._catch_up = None
