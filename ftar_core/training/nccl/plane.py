"""Gradients between replicas over NCCL, under the commits of the host's plane.

To `exchange` this is the ring, as the native engine is with data_plane="host": it is told of epochs, takes buckets and
says when one is reduced. Commits, retries, digests and catch-up know no difference. What is not a bucket of gradients
(the step's tally, plain operations, the meeting below) goes over the engine's ring, and so do heartbeats: *NCCL does
not notice that a member is gone*, its kernels wait for ever. The engine's links and the coordinator notice, as they
always do, and a new epoch is what ends the wait.

A communicator lives for one epoch. The member in the first slot mints its id, and a sum of 32 words over the engine's
ring, to which all others add zeros, brings it to them. A member's rank in NCCL is its slot. When the next epoch is
ordered the communicator is aborted, which ends the kernels that wait; then the next one is made and the step's buckets
are submitted again, from memory on the device that nobody has written since backward.

Two threads. The *conductor* makes every call to NCCL, none of which blocks but the abort: an abort that does not come
back in time ends the process, since what hangs in a driver cannot be ended otherwise and a replica is what may be lost.
The *collector* waits for the sums in order, brings each into host memory (for digests, the average, and replicas that
catch up) and announces it, unless its epoch is over by then: an aborted kernel's event comes too, with garbage.

If NCCL itself reports an error while all links are well, nobody else would end the epoch: `on_failed` is told.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ftar_core.errors import FtarError
from ftar_core.nccllib import Library, NcclType
from ftar_core.training.nccl.device import Device
from ftar_core.training.nccl.life import WORDS, Flight, Life, Phase, id_of, id_words
from ftar_core.training.nccl.order import Order
from ftar_core.training.operations import OPERATION_BUCKETS
from ftar_core.training.plan import DTYPE_CODES, BucketPlan
from ftar_core.training.retention import Inputs

if TYPE_CHECKING:
    from ftar_core.native._core import Event, Member

MEETING_BUCKET = OPERATION_BUCKETS - 1
NCCL_TYPES = {
    torch.float32: NcclType.FLOAT32,
    torch.float64: NcclType.FLOAT64,
    torch.bfloat16: NcclType.BFLOAT16,
    torch.float16: NcclType.FLOAT16,
}
POLL_S = 0.0005  # while NCCL is putting something on the stream
JOIN_LOOK_S = 0.002
LOOK_S = 0.05  # for errors, while buckets are under way


class HostRing(Protocol):
    """The part of ftar_core.native.core.Engine that is used here."""

    def prepare(self, epoch: bytes, members: list[Member], me: int) -> None: ...
    def activate(self, epoch: bytes) -> None: ...
    def discard(self, epoch: bytes) -> None: ...
    def abort(self) -> None: ...
    def submit(  # noqa: PLR0917 (the native call has no keywords)
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int
    ) -> None: ...
    def reduce(  # noqa: PLR0917
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int, timeout_ms: int
    ) -> Event | None: ...


@dataclass(frozen=True)
class Parts:
    """What a plane is made of. `join_s`: so long may NCCL take to connect an epoch's members; `abort_s`: to abort."""

    library: Library
    device: Device
    join_s: float = 120.0
    abort_s: float = 30.0


class NcclPlane:
    """Of one rank. `retained` and `reduced`: the buckets' inputs (on the device) and results (in host memory); the
    last of each is the tally's. `on_reduced(epoch, step, bucket)` is called in the collector, `on_failed(epoch, slot,
    members, reason)` in the conductor, `die(reason)` in a thread of its own: it must end the process."""

    def __init__(
        self,
        *,
        parts: Parts,
        engine: HostRing,
        plan: BucketPlan,
        retained: Inputs | Sequence[torch.Tensor],
        reduced: Sequence[torch.Tensor],
        on_reduced: Callable[[bytes, int, int], None],
        on_failed: Callable[[bytes, int, int, str], None],
        die: Callable[[str], None],
    ) -> None:
        self._parts, self._library, self._device = parts, parts.library, parts.device
        self._engine, self._plan = engine, plan
        self._retained, self._reduced = retained, reduced
        self._sums = [self._device.memory(bucket.count, bucket.dtype) for bucket in plan.buckets]
        self._on_reduced, self._on_failed, self._die = on_reduced, on_failed, die
        self._changed = threading.Condition()
        self._members: dict[bytes, tuple[int, int]] = {}  # of prepared epochs: how many, and my slot
        self._wanted: Life | None = None  # as ordered
        self._here: Life | None = None  # as it is: the conductor's
        self._collecting = self._closed = False
        self._break: tuple[int, int, int] | None = None
        self._broken: Exception | None = None  # a fault of the device, or of this program
        self._threads = [
            threading.Thread(target=self._conduct, name="ftar-nccl", daemon=True),
            threading.Thread(target=self._collect, name="ftar-nccl-sums", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- as the exchange's ring; none of it waits for NCCL

    def prepare(self, epoch: bytes, members: list[Member], me: int) -> None:
        self._engine.prepare(epoch, members, me)
        with self._changed:
            self._members[epoch] = len(members), me

    def activate(self, epoch: bytes) -> None:
        self._engine.activate(epoch)
        with self._changed:
            members, me = self._members.pop(epoch)
            self._members.clear()  # whatever else was prepared is prepared again
            self._order(Life(epoch, members, me, Order(len(self._plan.buckets)), time.monotonic()))

    def discard(self, epoch: bytes) -> None:
        self._engine.discard(epoch)
        with self._changed:
            self._members.pop(epoch, None)

    def abort(self) -> None:
        self._engine.abort()
        with self._changed:
            self._order(None)

    def submit(  # noqa: PLR0917
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int
    ) -> None:
        if bucket >= len(self._plan.buckets):
            self._engine.submit(epoch, step, bucket, src, dst, count, dtype)
            return
        with self._changed:
            life = self._wanted
            if life is not None and life.key == epoch:
                life.order.offer(step, bucket)
                self._changed.notify_all()

    def reduce(  # noqa: PLR0917
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int, timeout_ms: int
    ) -> Event | None:
        return self._engine.reduce(epoch, step, bucket, src, dst, count, dtype, timeout_ms)

    def heard(self, epoch: bytes, bucket: int) -> bool:
        """An event `reduced` of the engine. True if it was the meeting's, which concerns nobody else."""
        if bucket != MEETING_BUCKET:
            return False
        with self._changed:
            if self._wanted is not None and self._wanted.key == epoch:
                self._wanted.met = True
                self._changed.notify_all()
        return True

    def break_at(self, step: int, bucket: int, signal: int) -> None:
        """The point `bucket` of wire/breakpoints.py, as `Engine.break_at`: the all-reduce of that bucket is on the
        device's stream, so the others wait in theirs."""
        with self._changed:
            self._break = step, bucket, signal

    def quiet(self) -> None:
        """Returns when no result is written any more, after an abort: bounded by the abort's own bound. Raises
        FtarError if the device failed."""
        with self._changed:
            self._changed.wait_for(self._is_quiet)
            if self._broken is not None:
                raise FtarError(
                    f"gradients were not reduced on the device: {self._broken}",
                    hint="a fault of the device ends its replica; the others go on. See: ftctl status",
                ) from self._broken

    def _is_quiet(self) -> bool:
        life = self._here
        under_way = life is not None and (bool(life.flights) or life.begun is not None)
        settled = life is self._wanted and not under_way and not self._collecting
        return settled or self._broken is not None or self._closed

    def close(self) -> None:
        """Aborts the communicator; waits for that as long as an abort may take."""
        with self._changed:
            self._closed = True
            self._order(None)
        for thread in self._threads:
            thread.join(self._parts.abort_s)

    def _order(self, life: Life | None) -> None:
        """(locked)"""
        if self._wanted is not None:
            self._wanted.move(Phase.OVER, time.monotonic())
        self._wanted = life
        self._changed.notify_all()

    # --- the conductor

    def _conduct(self) -> None:
        self._device.enter()
        while True:
            with self._changed:
                closed, wanted = self._closed, self._wanted
            try:
                if self._here is not wanted:
                    self._part(self._here)
                    with self._changed:
                        self._here = wanted
                        self._changed.notify_all()
                wait_s = self._go_on(self._here) if self._here is not None else None
            except Exception as error:  # noqa: BLE001 - whatever it is, the epoch cannot be reduced here
                self._fail(self._here, str(error))
                wait_s = None
            with self._changed:
                if closed and self._here is None:
                    return
                if self._here is self._wanted and not self._may_begin(self._here):
                    self._changed.wait(wait_s)

    def _may_begin(self, life: Life | None) -> bool:
        """There is something to do at once. (locked)"""
        if life is None or life.phase not in (Phase.MEETING, Phase.OPEN, Phase.ALONE):
            return False
        if life.phase is Phase.MEETING:
            return life.met or not life.told
        return life.begun is None and life.order.ready

    def _go_on(self, life: Life) -> float | None:
        """The next thing. Returns after how many seconds to look again; None: when something happens."""
        if self._broken is not None and life.good:
            raise FtarError(f"gradients were not reduced on the device: {self._broken}")
        if life.phase is Phase.MEETING:
            return self._meet(life)
        if life.phase is Phase.JOINING:
            return self._connect(life)
        if life.phase in (Phase.OPEN, Phase.ALONE):
            return self._reduce(life)
        return None

    def _meet(self, life: Life) -> float | None:
        if not life.told:
            if life.me == 0:
                life.said.copy_(id_words(self._library.unique_id()))
            life.told = True
            code = DTYPE_CODES[torch.int32]
            # An epoch that is over by now: ignored.
            self._engine.submit(life.key, 0, MEETING_BUCKET, life.said.data_ptr(), life.heard.data_ptr(), WORDS, code)
        elif life.met:
            life.comm = self._library.join(id_of(life.heard), life.members, life.me)
            self._move(life, Phase.JOINING)
            return 0.0
        return None

    def _connect(self, life: Life) -> float:
        assert life.comm is not None  # noqa: S101
        if life.comm.ready():
            self._move(life, Phase.OPEN)
        elif time.monotonic() - life.since > self._parts.join_s:
            raise FtarError(f"NCCL did not connect the {life.members} members within {self._parts.join_s:g} s")
        return JOIN_LOOK_S

    def _reduce(self, life: Life) -> float | None:
        if life.comm is not None and not life.comm.ready():
            return POLL_S
        with self._changed:
            if life.begun is not None:  # it is on the stream now, not before
                self._passed(*life.begun)
                life.flights.append(Flight(*life.begun, self._device.mark() if life.comm is not None else None))
                life.begun = None
                self._changed.notify_all()
            following = life.order.take() if life.phase is not Phase.OVER else None
            if following is None:
                under_way = life.flights or self._collecting
                return LOOK_S if under_way and life.comm is not None else None
            life.begun = following
        if life.comm is not None:
            source, target = (buffers[following[1]] for buffers in (self._retained, self._sums))
            kind = NCCL_TYPES[source.dtype]
            life.comm.all_reduce(source.data_ptr(), target.data_ptr(), source.numel(), kind, self._device.stream)
        return 0.0

    def _passed(self, step: int, bucket: int) -> None:
        if self._break is not None and step >= self._break[0] and self._break[1] in (-1, bucket):
            signal, self._break = self._break[2], None
            os.kill(os.getpid(), signal)

    def _move(self, life: Life, phase: Phase) -> None:
        with self._changed:
            if life.phase is not Phase.OVER:
                life.move(phase, time.monotonic())

    def _fail(self, life: Life | None, reason: str) -> None:
        with self._changed:
            if life is None or life.phase in (Phase.OVER, Phase.FAILED):
                return
            life.move(Phase.FAILED, time.monotonic())
            life.reason = reason
        self._part(life)
        self._on_failed(life.key, life.me, life.members, reason)

    def _part(self, life: Life | None) -> None:
        """Abort its communicator: kernels that wait for others end."""
        if life is None or life.comm is None:
            return
        comm, life.comm = life.comm, None
        late = threading.Timer(
            self._parts.abort_s,
            self._die,
            (f"NCCL did not abort a communicator within {self._parts.abort_s:g} s: its kernels or network hang",),
        )
        late.daemon = True
        late.start()
        try:
            comm.abort()
        finally:
            late.cancel()

    # --- the collector

    def _collect(self) -> None:
        self._device.enter()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._here is not None and self._here.flights))
                life = self._here
                if life is None or not life.flights:
                    if self._closed:
                        return
                    continue
                flight = life.flights.popleft()
                self._collecting = True
            try:
                if self._bring(life, flight):
                    self._on_reduced(life.key, flight.step, flight.bucket)
            except Exception as error:  # noqa: BLE001 - the conductor, or `quiet`, tells what it was
                self._broken = error
            finally:
                with self._changed:
                    self._collecting = False
                    self._changed.notify_all()

    def _bring(self, life: Life, flight: Flight) -> bool:
        """The sum is in host memory. False: there is none, its epoch is over."""
        there = self._retained if flight.sum is None else self._sums
        if flight.sum is not None:
            flight.sum.wait()
        with self._changed:
            if not life.good:
                return False
        self._device.copy(self._reduced[flight.bucket], there[flight.bucket]).wait()
        return True
