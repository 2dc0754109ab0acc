"""Turns of a replica that does not contribute yet: one piece of catching up, a warm-up, or a wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ftar_core.errors import StateMismatch
from ftar_core.protocol.events import ShadowAt
from ftar_core.training.catchup import CatchUp, Next
from ftar_core.training.exchange import Place, Role
from ftar_core.training.follow import Identity
from ftar_core.training.plan import BucketPlan
from ftar_core.training.state import Stateful
from ftar_core.training.stepping import Leave, Stepper
from ftar_core.training.wiring import Wiring
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase

log = logging.getLogger("ftar.session")

JOIN_GRACE_S = 1.0  # a joining replica whose source changes rails; longer, and everybody waits for it
LOOK_S = 0.2


class Shadow:
    def __init__(
        self,
        *,
        wiring: Wiring,
        stepper: Stepper,
        plan: BucketPlan,
        parts: Mapping[str, Stateful],
        warm_ups: int,
        buffer_bytes: int,
    ) -> None:
        self._wiring, self._stepper, self._plan, self._parts = wiring, stepper, plan, parts
        self._warm_ups, self._buffer_bytes = warm_ups, buffer_bytes
        self._holds_state = False  # a state of this job, not just this process's own beginning
        self._catch_up: CatchUp | None = None
        self._lost_since: float | None = None

    @property
    def state(self) -> str | None:
        """A replica state of `ftctl status`; None while this replica is no shadow."""
        return self._catch_up.state if self._catch_up is not None else None

    def contributing(self, place: Place) -> None:
        """This replica begins a step as a contributor."""
        catch_up, self._catch_up = self._catch_up, None
        self._holds_state, self._warm_ups = True, 0  # the loop's body runs here from now on
        self._wiring.server.serve(True)
        if catch_up is not None:
            catch_up.close()
            self._lost_since = None
            # Once more, now that this member is in the epoch: the state before its first step is really here.
            self._wiring.post(ShadowAt(self._stepper.applied, place.last_commit_epoch, True, "contributing"))
            log.info("%s contributes from step %d on", self._wiring.settings.replica, place.step)

    def turn(self, place: Place) -> bool:
        """One piece of work, or a short wait. True: run a warm-up of the user's loop body. Raises Leave."""
        exchange = self._wiring.exchange
        if self._catch_up is None:
            self._wiring.server.serve(False)
            self._catch_up = self._begin(place)
        catch_up = self._catch_up
        joining = place.role is Role.CONTRIBUTOR
        if not joining:
            catch_up.set_sources(exchange.sources())
        if catch_up.refused:
            raise Leave(catch_up.refused, RankExit.REFUSED)
        self._wiring.phase(Phase.CATCHUP, max(catch_up.step, 0))
        try:
            doing = catch_up.advance(may_warm_up=not joining)
        except StateMismatch as error:
            raise Leave(str(error) + (f" ({error.hint})" if error.hint else ""), RankExit.REFUSED) from None
        if catch_up.step >= 0:
            self._stepper.applied, self._holds_state = catch_up.step, True
        if doing is Next.WAIT:
            if joining and not self._can_wait(catch_up):
                text = f"lost the stream before step {place.step - 1} arrived ({catch_up.text})"
                raise Leave(text, RankExit.RESTART)
            exchange.wait(LOOK_S)
        return doing is Next.WARM_UP

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
            identity=Identity(settings.job, settings.token, settings.replica, self._wiring.incarnation),
            plan=self._plan,
            rails=settings.rails,
            sources=self._wiring.exchange.sources(),
            have=self._stepper.applied if self._holds_state else -1,
            epoch=place.last_commit_epoch,
            warm_ups=self._warm_ups,
            buffer_bytes=self._buffer_bytes,
            parts=self._parts,
            replay=self._stepper.replay,
            tell=lambda step, epoch, ready, text: post(ShadowAt(step, epoch, ready, text)),
            on_news=self._wiring.exchange.poke,
        )

    def close(self) -> None:
        if self._catch_up is not None:
            self._catch_up.close()
            self._catch_up = None
