"""A shadow's way back, as the training thread walks it: fetch, replay, warm up, follow.

    fetching -> replaying -> two discarded warm-up steps -> spare (following) -> contributing

Every committed step is applied through the same `update` as on the replicas that made it, so the state is theirs bit
for bit. The warm-up steps run the user's own loop body once through forward and backward with the gradients dropped:
caches, allocators and lazy initialisation are then paid for before anybody waits for this replica.

`CatchUp` is driven by the session: it says where it stands (`ballot`), is told what to do next (lockstep.py), never
blocks, and never touches the model while user code runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ftar_core.runtime.rails import Rail
from ftar_core.training.dial import Identity
from ftar_core.training.follow import Follower, ReplayStep, Snapshot
from ftar_core.training.journal import Journal
from ftar_core.training.plan import BucketPlan
from ftar_core.training.restore import load_state
from ftar_core.training.state import Stateful
from ftar_core.wire.ids import NO_EPOCH, EpochId
from ftar_core.wire.messages import MemberInfo
from ftar_core.wire.team import Ballot, Front

log = logging.getLogger("ftar.session")


class CatchUp:
    """`replay(step)` applies a committed step. `tell(step, epoch, ready, text, notice)` posts ShadowAt (step -1: no
    state yet). `have` is the step whose state the training thread holds (-1: none)."""

    def __init__(
        self,
        *,
        identity: Identity,
        plan: BucketPlan,
        rails: Sequence[Rail],
        sources: Sequence[MemberInfo],
        have: int,
        epoch: EpochId,
        warm_ups: int,
        buffer_bytes: int,
        parts: Mapping[str, Stateful],
        replay: Callable[[ReplayStep], None],
        tell: Callable[[int, EpochId, bool, str, str], None],
        on_news: Callable[[], None],
        journal: Journal,
        spread: bool = False,
    ) -> None:
        self.step = have  # the state that the training thread holds now
        self.epoch = epoch if have >= 0 else NO_EPOCH
        self.state = "fetching"  # a replica state of `ftctl status`
        self.warm_ups_left = warm_ups
        self._front: Snapshot | ReplayStep | None = None  # has arrived, is not applied
        self._parts, self._replay, self._tell = parts, replay, tell
        self._journal = journal
        self._told = ""
        self._began = time.monotonic()
        self._follower = Follower(
            identity=identity,
            plan=plan,
            rails=rails,
            sources=sources,
            have=have,
            on_news=on_news,
            buffer_bytes=buffer_bytes,
            on_restart=self._restarted,
            spread=spread,
        )

    @property
    def connected(self) -> bool:
        """A source's stream is running."""
        return self._follower.connected

    @property
    def refused(self) -> str:
        return self._follower.refused

    @property
    def text(self) -> str:
        return self._follower.text

    def set_sources(self, sources: Sequence[MemberInfo]) -> None:
        self._follower.set_sources(sources)

    def set_rate(self, mbit: float) -> None:
        """This rank's share of what the job allows for catching up; 0: no limit."""
        self._follower.set_rate(mbit)

    def ballot(self) -> Ballot:
        """Where this rank stands."""
        front = self._look()
        connected = self._follower.connected
        if isinstance(front, Snapshot):
            return Ballot(self.step, Front.SNAPSHOT, front.step, connected, self.warm_ups_left)
        if front is not None:
            return Ballot(self.step, Front.STEP, front.step, connected, self.warm_ups_left)
        return Ballot(self.step, Front.NOTHING, 0, connected, self.warm_ups_left)

    def _look(self) -> Snapshot | ReplayStep | None:
        while self._front is None:
            item = self._follower.poll()
            if item is None:
                break
            if (
                isinstance(item, Snapshot) or item.step == self.step + 1
            ):  # an older one was replaced by a newer snapshot
                self._front = item
        return self._front

    def apply_front(self) -> None:
        """Load the snapshot, or replay the step, that the ballot named. Raises StateMismatch for a state that is not
        this model's."""
        item, self._front = self._front, None
        if isinstance(item, Snapshot):
            self._load(item)
        elif item is not None:
            self._replay(item)
            self.step, self.epoch = item.step, item.epoch
            self._report(f"replayed step {item.step}" if self.state != "spare" else "following")

    def warm_up(self) -> None:
        """One of the warm-up steps is about to be made."""
        self.warm_ups_left -= 1

    def follow(self) -> None:
        """Caught up and warm: from here on this replica can contribute from a boundary on."""
        if self.state != "spare":
            self.state = "spare"
            log.info("caught up with step %d after %.2f s", self.step, time.monotonic() - self._began)
            self._tell(self.step, self.epoch, True, "following", "")

    def wait(self) -> None:
        """Nothing to do until there is news."""
        if not self._follower.connected or self.step < 0:
            if self.state == "spare":
                self.state = "replaying"  # not ready to contribute until a stream runs again
            self._report(self._follower.text)

    def _load(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        if snapshot.state is not None:
            load_state(self._parts, snapshot.state)
            loaded_s = time.monotonic() - began
            log.info(
                "state after step %d from %s: %d bytes in %.2f s, loaded in %.1f ms",
                snapshot.step,
                snapshot.source,
                snapshot.state.nbytes,
                snapshot.seconds,
                loaded_s * 1000,
            )
            self._journal.write(
                "fetch",
                {
                    "step": snapshot.step,
                    "bytes": snapshot.state.nbytes,
                    "fetch_s": snapshot.seconds,
                    "load_s": loaded_s,
                    "sources": dict(snapshot.by_source),
                },
            )
        self.step, self.epoch = snapshot.step, snapshot.epoch
        self.state = "replaying"
        self._report(f"holds the state after step {snapshot.step}")

    def _report(self, text: str) -> None:
        ready = self.state == "spare"
        if ready or text != self._told:
            self._told = text
            self._tell(self.step, self.epoch, ready, text, "")

    def _restarted(self, why: str) -> None:
        """In the follower's threads: everybody is told, since nothing else shows why this takes so long."""
        self._journal.write("catchup-restart", {"step": self.step, "reason": why})
        self._tell(self.step, self.epoch, False, why, why)

    def close(self) -> None:
        self._follower.close()
