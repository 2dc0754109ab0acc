"""Who wants what of a state server: the books that the training thread, the copier and the connections share.

Snapshots stand on the shelf by step, for as long as somebody fetches them and a while longer, so that a shadow whose
rail has failed comes back to the same bytes. At most MAX_HELD of them: a shadow that comes while others still fetch
older ones waits, rather than host memory being filled with states.

A subscription is a stream of committed steps from a snapshot on. It outlives its connection for a while, and has a
bounded queue: a shadow that does not read is cut off and begins again from a newer snapshot."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ftar_core.training.snapshots import Copier, Held
from ftar_core.training.state import LiveState
from ftar_core.training.statewire import KEPT_S, Offer, StepData
from ftar_core.wire.ids import EpochId

MAX_HELD = 2
URGENT_S = 0.25  # a wait for the commit that is this long may become longer: do not put shadows off to the next update
ANY_STEP = -1


@dataclass
class StepItem:
    """One committed step for the followers; nobody writes into `buckets` while `users` (subscriptions) hold it."""

    header: StepData
    buckets: tuple[torch.Tensor, ...]
    users: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.header.sizes)


@dataclass(eq=False)
class Subscription:
    id: bytes
    replica: str
    have: int
    generation: int = 0  # of the connection that serves it
    offer: Offer | None = None  # attached: the queue runs on from that step
    queue: deque[StepItem] = field(default_factory=deque)
    queued_bytes: int = 0
    cut: str = ""
    orphaned_at: float | None = None


@dataclass(eq=False)
class Borrower:
    """A connection that wants the state after `step` (ANY_STEP: whatever is copied next)."""

    step: int
    held: Held | None = None
    missed: str = ""  # it cannot be had any more
    patience: float = 0.0  # of a step: so long may the next update wait for its copy


class Shelf:
    """`changed` guards everything. The methods take it themselves."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.changed = threading.Condition()
        self.copier = Copier(self._put)
        self.subscriptions: dict[bytes, Subscription] = {}
        self.borrowers: set[Borrower] = set()
        self.held: dict[int, Held] = {}
        self.max_held = MAX_HELD
        self.serving = False  # this replica holds state to give
        self.closed = False
        self._at: int | None = None  # the step whose state the training thread has shown; None: it has changed since
        self._free: list[tuple[torch.Tensor, ...]] = []  # memory of steps that all followers have

    # --- the training thread

    def serve(self, serving: bool) -> None:
        with self.changed:
            self.serving = serving
            if not serving:
                for subscription in self.subscriptions.values():
                    self.cut(subscription, "this replica is catching up itself")
                for borrower in self.borrowers:
                    borrower.missed = borrower.missed or "this replica is catching up itself"
            self.changed.notify_all()

    def wanted(self) -> bool:
        """Does a shadow wait for a snapshot, or for its stream to begin?"""
        with self.changed:
            waiting = any(b.held is None and not b.missed for b in self.borrowers)
            return waiting or bool(self._unattached())

    def look(
        self, step: int, epoch: EpochId, live: Callable[[], LiveState], *, behind_update: bool, waited_s: float
    ) -> bool:
        """Between two updates: give what is there, begin a copy of the state after `step` if somebody needs it. True
        if one was begun. `waited_s`: for how long the training thread has waited already."""
        self._forget()
        with self.changed:
            self._at = step
            for borrower in self.borrowers:
                if borrower.held is None and ANY_STEP < borrower.step < step and borrower.step not in self.held:
                    borrower.missed = borrower.missed or f"it is past step {borrower.step}"
            for subscription in self._unattached():
                if subscription.have in (step, step + 1):  # one more: a commit we have yet to hear of
                    subscription.offer = Offer(step=step, epoch=epoch, skeleton=b"", tensors=())
            if step in self.held:
                self._give(self.held[step])
            self.changed.notify_all()
            borrowers = [b for b in self.borrowers if b.held is None and not b.missed and b.step in (ANY_STEP, step)]
            exact = any(b.step == step for b in borrowers)
            if not borrowers and not self._unattached():
                return False
            if not (behind_update or exact or waited_s >= URGENT_S) or self.copier.busy:
                return False
            if len(self.held) >= self.max_held and not self._make_room():
                return False
            patience = max((b.patience for b in borrowers), default=0.0)
        self.copier.start(live(), step, epoch, patience)
        return True

    def changing(self) -> None:
        """The next update is due."""
        with self.changed:
            self._at = None
            if self.held or self.subscriptions:
                self._forget()

    def followed(self) -> bool:
        return any(s.offer is not None and not s.cut for s in list(self.subscriptions.values()))

    def step_memory(self, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Memory for one step's buckets: of a step that everybody has, if there is one."""
        with self.changed:
            if self._free:
                return self._free.pop()
        return tuple(torch.empty_like(tensor, device="cpu") for tensor in like)

    def publish(self, item: StepItem) -> None:
        """Queue a committed step for all followers."""
        self._forget()
        with self.changed:
            for subscription in self.subscriptions.values():
                if subscription.offer is None or subscription.cut:
                    continue
                if subscription.queued_bytes + item.nbytes > self.buffer_bytes:
                    self.cut(subscription, f"more than {self.buffer_bytes} bytes behind")
                    continue
                subscription.queue.append(item)
                subscription.queued_bytes += item.nbytes
                item.users += 1
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.copier.close()

    # --- the copier's thread

    def _put(self, held: Held) -> None:
        with self.changed:
            self.held[held.step] = held
            self._give(held)
            self.changed.notify_all()

    # --- with the lock

    def _unattached(self) -> list[Subscription]:
        return [s for s in self.subscriptions.values() if s.offer is None and not s.cut]

    def _give(self, held: Held) -> None:
        for subscription in self._unattached():
            state = held.state
            subscription.offer = Offer(step=held.step, epoch=held.epoch, skeleton=state.skeleton, tensors=state.infos)
        for borrower in self.borrowers:
            if borrower.held is None and not borrower.missed and borrower.step in (ANY_STEP, held.step):
                borrower.held = held
                held.users += 1

    def cut(self, subscription: Subscription, reason: str) -> None:
        subscription.cut = reason
        while subscription.queue:
            self.drop_first(subscription)

    def drop_first(self, subscription: Subscription) -> None:
        """The oldest step of the queue is not needed any more."""
        item = subscription.queue.popleft()
        subscription.queued_bytes -= item.nbytes
        item.users -= 1
        if item.users == 0 and item.buckets and len(self._free) < 2:
            self._free.append(item.buckets)

    def _make_room(self) -> bool:
        idle = [step for step, held in self.held.items() if held.users == 0]
        if idle:
            del self.held[min(idle)]
        return bool(idle)

    def _forget(self) -> None:
        """What nobody has come back for."""
        now = time.monotonic()
        with self.changed:
            for key, subscription in list(self.subscriptions.items()):
                if subscription.orphaned_at is not None and now - subscription.orphaned_at > KEPT_S:
                    self.cut(subscription, "nobody reads it")
                    del self.subscriptions[key]
            for step, held in list(self.held.items()):
                if held.users == 0 and now - held.idle_since > KEPT_S:
                    del self.held[step]
            if not self.subscriptions:
                self._free.clear()

    # --- connections

    def borrow(self, borrower: Borrower) -> None:
        """From now on it waits for its snapshot."""
        with self.changed:
            if not self.serving:
                borrower.missed = "this replica holds no state now"
            elif held := self.held.get(borrower.step if borrower.step != ANY_STEP or self._at is None else self._at):
                borrower.held = held
                held.users += 1
            self.borrowers.add(borrower)
            self.changed.notify_all()

    def give_back(self, borrower: Borrower) -> None:
        with self.changed:
            self.borrowers.discard(borrower)
            if borrower.held is not None:
                borrower.held.users -= 1
                borrower.held.idle_since = time.monotonic()
                borrower.held = None
            self._forget()
