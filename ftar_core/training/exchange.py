"""Where three threads meet: the training thread, the member's control loop, and (through it) the native core.

The control loop must act at once when the membership changes, while the training thread is deep in a backward pass. So
what is needed for a retry lives here, behind one lock: the epoch, which buckets of the step are produced, which are
reduced. `enter_epoch` makes the native core forget the old epoch and submits again whatever is already produced;
buckets that backward produces later go to the new epoch by themselves. The training thread notices nothing until it
asks for results.

What the control loop decides about the *state* of training (commits, the end, becoming a shadow) is only noted here;
the training thread takes it with `wait`, in order: commits first, then the rest."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from ftar_core.protocol.effects import ApplyCommit, End, EnterEpoch, FollowSources, StandDown
from ftar_core.training.operations import OPERATION_BUCKETS, OperationRing, Operations
from ftar_core.training.plan import DTYPE_CODES, BucketPlan
from ftar_core.training.retention import Inputs
from ftar_core.wire.ids import NO_EPOCH, EpochId, epoch_key
from ftar_core.wire.messages import Deal, EpochInfo, MemberInfo

if TYPE_CHECKING:
    from ftar_core.native._core import Member


class Ring(OperationRing, Protocol):
    """The part of ftar_core.native.core.Engine that is used here."""

    def prepare(self, epoch: bytes, members: list[Member], me: int) -> None: ...
    def activate(self, epoch: bytes) -> None: ...
    def discard(self, epoch: bytes) -> None: ...
    def abort(self) -> None: ...


# epoch, step, bucket, address of the inputs, of the results, count, dtype: as `Ring.submit`
Submit = Callable[[bytes, int, int, int, int, int, int], None]


class Role(Enum):
    NEW = "new"  # not told yet what to be
    CONTRIBUTOR = "contributor"
    SHADOW = "shadow"


class News(Enum):
    """Why `wait` returned."""

    COMMIT = "commit"
    BUCKET = "bucket"  # further buckets are reduced, but not all; see `reduced_so_far`
    REDUCED = "reduced"  # all buckets of the step, in the current epoch; not yet taken with `take_reduced`
    END = "end"
    ROLE = "role"  # the role or the sources have changed
    POKE = "poke"  # somebody called `poke`
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Place:
    """A consistent look at where the job is."""

    role: Role
    epoch: EpochInfo | None
    step: int
    deal: Deal
    last_commit_epoch: EpochId
    retries: int
    holding: str
    stopping: bool  # the last commit of this member was noted: nothing comes after it but the end
    life: int = 0  # rises when this member stands down: what was begun in an earlier life is void
    forget: int = 0  # rises when the state that is here must not be built on
    restore: bool = False  # nobody holds the job's state: a checkpoint is to be looked for


class Exchange:
    def __init__(
        self,
        *,
        job: str,
        replica: str,
        plan: BucketPlan,
        ring: Ring,
        retained: Inputs | Sequence[torch.Tensor],
        reduced: Sequence[torch.Tensor],
        on_progress: Callable[[int, int, int], None] = lambda step, produced, reduced: None,
        rank: int = 0,
        release: Callable[[int], None] | None = None,
        on_device: Collection[int] = (),
        submit_on_device: Submit | None = None,
    ) -> None:
        """`release(bucket)`: the inputs of a bucket are not kept once it is reduced, so a step that must be reduced
        again is begun again by the loop. None: they are kept. `on_device`: buckets whose buffers are on the ring's
        device, to be submitted with `submit_on_device`."""
        self._submit_to = {bucket: submit_on_device for bucket in on_device if submit_on_device is not None}
        self._release = release
        self._released = False  # inputs of this step are gone
        self._void = False  # and it must be reduced again: what this turn produces is of no use
        self._rank = rank  # of this process in its replica: it is in the ring of that number
        self._job, self._replica, self._plan, self._ring = job, replica, plan, ring
        self._retained, self._reduced_into = retained, reduced
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._role = Role.NEW
        self._epoch: EpochInfo | None = None
        self._key = b""
        self._step = 0
        self._deal = Deal(batches={}, cursor=0)
        self._last_commit_epoch = NO_EPOCH
        self._retries = 0
        self._produced: set[int] = set()
        self._submitted: set[int] = set()  # in this epoch
        self._reduced: set[int] = set()
        self._looked = 0  # so many of them were there when `wait` last returned BUCKET
        self._taken_epoch: EpochId | None = None  # the epoch whose results `take_reduced` has returned
        self._commits: deque[tuple[int, ApplyCommit]] = deque()
        self._end: End | None = None
        self._sources: tuple[MemberInfo, ...] = ()
        self.catchup_mbit = 0.0  # at most so fast from them; 0: no limit
        self._role_version = self._role_seen = 0
        self._pokes = self._pokes_seen = 0
        self._holding = ""
        self._stopping = False
        self.operations = Operations(
            replica=replica,
            ring=ring,
            changed=self._changed,
            ended=lambda: self._end is not None,
            produced=lambda: frozenset(self._produced),
        )
        self._restore = False
        self._life = self._turn_life = 0
        self._forget = 0
        self.watch_buckets = False  # `wait` returns for each; set by the training thread

    # --- control loop ----------------------------------------------------------------------------------------------

    def members_of(self, epoch: EpochInfo) -> tuple[list[Member], int]:
        """The ring of an epoch as the native core takes it, and my index. Raises ValueError if I am not in it.

        Only the neighbours' addresses are known, and needed."""
        members: list[Member] = []
        for member in epoch.members:
            info = member.at(self._rank)
            rails = [(e.rail, e.addr, e.port) for e in info.links] if info is not None else []
            members.append({"name": member.replica, "incarnation": member.incarnation, "rails": rails})
        return members, epoch.names().index(self._replica)

    def prepare_ring(self, epoch: EpochInfo) -> None:
        members, me = self.members_of(epoch)
        self._ring.prepare(epoch_key(self._job, epoch.id, self._rank), members, me)

    def discard_ring(self, epoch: EpochId) -> None:
        self._ring.discard(epoch_key(self._job, epoch, self._rank))

    def enter_epoch(self, order: EnterEpoch) -> None:
        """Abort what is in flight, reduce `order.step` in this epoch from now on."""
        key = epoch_key(self._job, order.epoch.id, self._rank)
        members, me = self.members_of(order.epoch)
        with self._changed:
            # Under the lock: no bucket may be submitted between the abort and the new epoch's name.
            self._ring.prepare(key, members, me)
            self._ring.activate(key)
            if order.step != self._step:
                self._new_step(order.step)
            elif order.retry:
                self._retries += 1
                if order.deal.batches.get(self._replica) != self._deal.batches.get(self._replica):
                    # Dealt anew, because nobody is left who was dealt a batch: this member had none, and what it has
                    # produced are the zeros of a step without one.
                    self._produced.clear()
                    self._role_version += 1
                    self.operations.void()
            if self._released:
                self._begin_again()
            self._epoch, self._key = order.epoch, key
            self._deal, self._last_commit_epoch = order.deal, order.last_commit_epoch
            self._holding = ""
            self._submitted.clear()
            self._reduced.clear()
            self._taken_epoch = None
            if self._role is not Role.CONTRIBUTOR:
                self._role = Role.CONTRIBUTOR
                self._role_version += 1
            self.operations.entered(key, order.epoch, order.step, order.deal)
            self._submit_produced()
            self._changed.notify_all()

    def apply_commit(self, order: ApplyCommit) -> None:
        commit = order.commit.whole()
        with self._changed:
            if self._role is not Role.CONTRIBUTOR:
                return  # a shadow hears of commits from the replica it follows
            self._commits.append((self._retries, order))
            self._stopping = commit.last or self._replica in commit.drained
            self._new_step(commit.step + 1)
            self._deal, self._last_commit_epoch = commit.deal, commit.epoch
            self.operations.new_step(self._step, commit.deal)
            self._holding = ""
            self._changed.notify_all()

    def follow_sources(self, order: FollowSources) -> None:
        with self._changed:
            if self._role is not Role.SHADOW:
                self._ring.abort()
                self._epoch, self._key = None, b""
                self._produced.clear()
                self._reduced.clear()
            self.operations.left()
            self._role = Role.SHADOW
            self._holding = ""  # it was told to wait; now it has something to do
            self._forget += order.fresh
            self._sources, self.catchup_mbit = order.sources, order.mbit
            self._role_version += 1
            self._changed.notify_all()

    def stand_down(self, order: StandDown) -> None:
        """This life is out. Gradients of the turn that the training thread is in belong to nobody: `produced` drops
        them from now on, until a step is begun in the new life."""
        with self._changed:
            self._ring.abort()
            self._epoch, self._key = None, b""
            if self._release is not None:
                for bucket in self._produced:
                    self._release(bucket)
            self._released = self._void = False
            self._produced.clear()
            self._reduced.clear()
            self._taken_epoch = None
            self.operations.left()
            self._role, self._sources, self._holding = Role.NEW, (), ""
            self._life += 1
            self._forget += not order.keep
            self._role_version += 1
            self._changed.notify_all()

    def restore(self) -> None:
        with self._changed:
            self._restore = True
            self._role_version += 1
            self._changed.notify_all()

    def take_restore(self) -> None:
        """In the training thread: it is being done."""
        with self._changed:
            self._restore = False

    def holding(self, reason: str) -> None:
        with self._changed:
            self._holding = reason
            self._changed.notify_all()

    def end(self, exit_code: int, reason: str) -> None:
        with self._changed:
            if self._end is None:
                self._end = End(exit_code, reason)
            self._changed.notify_all()

    def reduced(self, epoch: bytes, step: int, bucket: int) -> None:
        """The native core: a bucket is complete."""
        with self._changed:
            if epoch != self._key:
                return
            if bucket >= OPERATION_BUCKETS:
                waited = not self.operations.settled
                self.operations.reduced(step, bucket)
                if waited:
                    self._submit_produced()
                self._changed.notify_all()
                return
            if step != self._step or bucket not in self._produced:
                return
            self._reduced.add(bucket)
            if self._release is not None:
                self._release(bucket)
                self._released = True
            self._progressed()
            if self.watch_buckets or len(self._reduced) == len(self._plan.all_buckets):
                self._changed.notify_all()

    def _begin_again(self) -> None:
        """The ring is aborted, and what it must reduce again is not there any more."""
        if self._release is not None:
            for bucket in self._produced:
                self._release(bucket)
        self._produced.clear()
        self._released, self._void = False, True
        self._role_version += 1

    def current(self, epoch: bytes) -> EpochInfo | None:
        """The epoch of this key, if it is the current one."""
        with self._changed:
            return self._epoch if epoch == self._key else None

    def _new_step(self, step: int) -> None:
        self._step = step
        self._retries = 0
        self._released = self._void = False
        self._produced.clear()
        self._submitted.clear()
        self._reduced.clear()
        self._taken_epoch = None
        self.operations.new_step(step, None)

    def _progressed(self) -> None:
        """Plain operations count, too: who has begun fewer holds up the others."""
        operations = self.operations
        produced, reduced = len(self._produced) + operations.begun, len(self._reduced) + operations.made
        self._on_progress(self._step, produced, reduced)

    def _submit_produced(self) -> None:
        """All that may go to the ring now: everything, or what comes before the operation that is answered for."""
        may = self._produced if self.operations.settled else self._produced & self.operations.before
        for bucket in sorted(may - self._submitted):
            self._submit(bucket)

    def _submit(self, bucket: int) -> None:
        self._submitted.add(bucket)
        layout = self._plan.all_buckets[bucket]
        self._submit_to.get(bucket, self._ring.submit)(
            self._key,
            self._step,
            bucket,
            self._retained[bucket].data_ptr(),
            self._reduced_into[bucket].data_ptr(),
            layout.count,
            DTYPE_CODES[layout.dtype],
        )

    # --- training thread -------------------------------------------------------------------------------------------

    def produced(self, bucket: int) -> None:
        """All gradients of a bucket lie in its retained buffer (called from the hooks, during backward)."""
        with self._changed:
            if self._turn_life != self._life or self._void:
                if self._release is not None:
                    self._release(bucket)
                return
            self._produced.add(bucket)
            if self._role is Role.CONTRIBUTOR and self._epoch is not None and self.operations.settled:
                self._submit(bucket)
            self._progressed()

    def begin(self, place: Place) -> None:
        """The training thread begins the step of `place`: what it produces from here on counts, if that life lasts."""
        with self._changed:
            self._turn_life = place.life
            self._released = self._void = False
            self.operations.begin(place.step)
            if place.life != self._life:
                self.operations.void()

    @property
    def void(self) -> bool:
        """The step must be reduced again, and its gradients are gone: the turn has to be made once more."""
        with self._changed:
            return self._void

    def place(self) -> Place:
        with self._changed:
            return Place(
                self._role,
                self._epoch,
                self._step,
                self._deal,
                self._last_commit_epoch,
                self._retries,
                self._holding,
                self._stopping,
                self._life,
                self._forget,
                self._restore,
            )

    def poke(self) -> None:
        """Make `wait` return: something that the training thread looks after has changed."""
        with self._changed:
            self._pokes += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> News:
        """Block until there is news. Commits come before everything else, an end after all commits are taken."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._commits:
                    return News.COMMIT
                if self._end is not None:
                    return News.END
                if self._role_seen != self._role_version:
                    self._role_seen = self._role_version
                    return News.ROLE
                if self._all_reduced() and self._taken_epoch is None:
                    return News.REDUCED
                if self.watch_buckets and self._looked != len(self._reduced) and self._taken_epoch is None:
                    self._looked = len(self._reduced)
                    if self._looked:
                        return News.BUCKET
                if self._pokes_seen != self._pokes:
                    self._pokes_seen = self._pokes
                    return News.POKE
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return News.TIMEOUT
                self._changed.wait(left_s)

    def _all_reduced(self) -> bool:
        return self._epoch is not None and len(self._reduced) == len(self._plan.all_buckets)

    def reduced_epoch(self) -> EpochId | None:
        """The epoch in which all buckets of the step are reduced now, if they are."""
        with self._changed:
            return self._epoch.id if self._epoch is not None and self._all_reduced() else None

    def reduced_so_far(self) -> tuple[EpochId | None, tuple[int, ...]]:
        """The current epoch, and the buckets of the step that are reduced in it."""
        with self._changed:
            return (self._epoch.id if self._epoch is not None else None), tuple(self._reduced)

    def take_reduced(self, epoch: EpochId, then: Callable[[], None]) -> bool:
        """If the results are still those of `epoch`, note that they were used and call `then` under the lock (so that
        no newer epoch can come between); else False."""
        with self._changed:
            if self._epoch is None or self._epoch.id != epoch or not self._all_reduced():
                return False
            self._taken_epoch = epoch
            then()
            return True

    def take_commit(self) -> tuple[int, ApplyCommit]:
        """(how often its step was retried, the oldest commit not taken yet). After News.COMMIT only."""
        with self._changed:
            return self._commits.popleft()

    def drop_commits(self) -> None:
        """This member leaves: what was committed is of no use to it any more."""
        with self._changed:
            self._commits.clear()
            self._changed.notify_all()

    def ended(self) -> End | None:
        with self._changed:
            return self._end if not self._commits else None

    def sources(self) -> tuple[MemberInfo, ...]:
        with self._changed:
            return self._sources
