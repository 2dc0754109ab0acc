"""The plane against the fake library, members of one process: order, aborts and their bounds, errors, and no leftovers.

The host's ring is a table in memory here: what it must do for the plane is add up the words of a meeting."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ftar_core.errors import FtarError, SettingsError
from ftar_core.nccllib import Library
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.nccl.device import device_for
from ftar_core.training.nccl.plane import NcclPlane, Parts
from ftar_core.training.nccl.retained import OnDevice, retain_there
from ftar_core.training.plan import make_plan
from ftar_core.training.retention import unpinned
from tests.training.test_gradients import TwoHeads, reference
from tests.training.test_staging import GARBAGE, Announced, LateLane, finish

from .fake import HostDevice, build

if TYPE_CHECKING:
    from ftar_core.native._core import Event
    from ftar_core.native._core import Member as NativeMember

MODEL = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 1))
PLAN = make_plan(MODEL, 512)
BUCKETS = len(PLAN.buckets)


class Hub:
    """All members' host rings. `cut`: nothing arrives any more."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: dict[bytes, list[One]] = {}
        self.cut = False


class One:
    """One member's end of it."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.plane: NcclPlane | None = None
        self.members: dict[bytes, int] = {}
        self.words: dict[bytes, tuple[int, int, int]] = {}
        self.other: list[int] = []  # buckets that are not the meeting's

    def prepare(self, epoch: bytes, members: list[NativeMember], me: int) -> None:
        self.members[epoch] = len(members)

    def activate(self, epoch: bytes) -> None:
        with self.hub.lock:  # as the engine: nothing of another epoch is read or written from here on
            for others in self.hub.active.values():
                others[:] = [one for one in others if one is not self]
            self.words.clear()
            self.hub.active.setdefault(epoch, []).append(self)

    def discard(self, epoch: bytes) -> None: ...

    def abort(self) -> None: ...

    def submit(self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int) -> None:
        if count != 32:
            self.other.append(bucket)
            return
        with self.hub.lock:
            if self not in self.hub.active[epoch]:
                return
            self.words[epoch] = src, dst, bucket
            there = [one for one in self.hub.active[epoch] if epoch in one.words]
            if self.hub.cut or len(there) < self.members[epoch]:
                return
            sums = torch.zeros(32, dtype=torch.int32)
            for one in there:
                given = (ctypes.c_int32 * 32).from_address(one.words[epoch][0])
                sums += torch.tensor(list(given), dtype=torch.int32)
            for one in there:
                ctypes.memmove(one.words[epoch][1], sums.data_ptr(), 128)
        for one in there:
            assert one.plane is not None
            assert one.plane.heard(epoch, bucket)

    def reduce(
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int, timeout_ms: int
    ) -> Event | None:
        return None


@dataclass
class Member:
    plane: NcclPlane
    device: HostDevice
    ring: One
    retained: OnDevice
    reduced: list[torch.Tensor]
    done: list[tuple[bytes, int, int]] = field(default_factory=list)
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    died: list[str] = field(default_factory=list)

    def enter(self, epoch: bytes, members: int, me: int) -> None:
        self.plane.prepare(epoch, [{"name": f"r{i}", "incarnation": 1, "rails": []} for i in range(members)], me)
        self.plane.activate(epoch)

    def submit(self, epoch: bytes, step: int, *buckets: int) -> None:
        for bucket in buckets:
            self.plane.submit(epoch, step, bucket, 0, 0, 0, 0)


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., list[Member]]]:
    monkeypatch.setenv("FAKE_NCCL_SWITCHES", str(tmp_path))
    made: list[Member] = []
    hub = Hub()

    def make(count: int, **bounds: float) -> list[Member]:
        library = Library(build())
        for number in range(count):
            device, ring = HostDevice(library.path), One(hub)
            retained, reduced = OnDevice(PLAN, device), [torch.zeros(b.count, dtype=b.dtype) for b in PLAN.all_buckets]
            for bucket in PLAN.buckets:
                retained[bucket.index].copy_(torch.randn(bucket.count, generator=torch.Generator().manual_seed(number)))
            done: list[tuple[bytes, int, int]] = []
            failed: list[tuple[bytes, str]] = []
            died: list[str] = []
            plane = NcclPlane(
                parts=Parts(library, device, **bounds),
                engine=ring,
                plan=PLAN,
                retained=retained,
                reduced=reduced,
                on_reduced=lambda *what, done=done: done.append(what),
                on_failed=lambda key, slot, members, why, failed=failed: failed.append((key, why)),
                die=died.append,
            )
            ring.plane = plane
            made.append(Member(plane, device, ring, retained, reduced, done, failed, died))
        return made

    yield make
    for path in tmp_path.glob("*"):
        path.unlink()
    for member in made:
        member.plane.close()
    assert not made or made[0].device.live() == 0, "no communicator is left over"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def assert_sums(members: list[Member], *given: Member) -> None:
    for bucket in range(BUCKETS):
        total = given[0].retained[bucket].clone()
        for member in given[1:]:
            total += member.retained[bucket]
        assert all(torch.equal(member.reduced[bucket], total) for member in members), bucket


def test_buckets_that_backward_fills_in_different_order_are_added_up_as_they_belong(
    team: Callable[..., list[Member]],
) -> None:
    assert BUCKETS > 2
    one, two, three = members = team(3)
    for me, member in enumerate(members):
        member.enter(b"e1", 3, me)
    for step in (1, 2):
        one.submit(b"e1", step, *range(BUCKETS))
        two.submit(b"e1", step, BUCKETS - 1)
        time.sleep(0.05)  # it would be on the stream by now, if it did not wait for the others
        two.submit(b"e1", step, *reversed(range(BUCKETS - 1)))
        three.submit(b"e1", step, *range(1, BUCKETS), 0)
        until(lambda step=step: all(len(member.done) == step * BUCKETS for member in members))
        assert_sums(members, one, two, three)
    assert one.done == two.done == [(b"e1", step, bucket) for step in (1, 2) for bucket in range(BUCKETS)]
    assert not one.ring.other
    one.submit(b"e1", 2, BUCKETS)  # the tally
    assert one.ring.other == [BUCKETS], "is the host's ring's"


def test_a_member_that_is_gone_is_waited_for_until_the_next_epoch_and_nothing_of_the_last_counts(
    team: Callable[..., list[Member]],
) -> None:
    """Two of three have put a bucket on their streams. They go on without the third, then one alone."""
    one, two, three = members = team(3)
    for me, member in enumerate(members):
        member.enter(b"e1", 3, me)
    one.submit(b"e1", 1, *range(BUCKETS))
    two.submit(b"e1", 1, 0)
    until(lambda: one.plane._collecting and two.plane._collecting)
    for me, member in enumerate((one, two)):
        member.enter(b"e2", 2, me)
        member.submit(b"e1", 1, 1)  # late: of an epoch that is over
        member.submit(b"e2", 1, *range(BUCKETS))
    until(lambda: len(one.done) == len(two.done) == BUCKETS)
    assert {key for key, _, _ in one.done} == {b"e2"}
    assert_sums([one, two], one, two)
    one.enter(b"e3", 1, 0)
    one.submit(b"e3", 1, *range(BUCKETS))
    until(lambda: len(one.done) == 2 * BUCKETS)
    assert_sums([one], one)
    for member in (one, two, three):
        member.plane.abort()
        member.plane.quiet()
    assert one.device.live() == 0
    assert not one.failed + two.failed + three.failed


def test_epochs_that_follow_each_other_faster_than_nccl_connects(team: Callable[..., list[Member]]) -> None:
    members = team(2)
    for number in range(20):
        for me, member in enumerate(members):
            member.enter(b"e%d" % number, 2, me)
            member.submit(b"e%d" % number, 1, *range(BUCKETS))
    until(lambda: all(len([k for k, _, _ in m.done if k == b"e19"]) == BUCKETS for m in members))
    assert_sums(members, *members)
    assert members[0].device.live() == 2


def test_a_meeting_that_a_dead_member_keeps_from_ending_ends_with_its_epoch(team: Callable[..., list[Member]]) -> None:
    one, two, _ = team(3)
    one.enter(b"e1", 3, 0)
    two.enter(b"e1", 3, 1)
    one.submit(b"e1", 1, 0)
    until(lambda: one.ring.words)
    assert one.device.live() == 0
    for me, member in enumerate((one, two)):
        member.enter(b"e2", 2, me)
        member.submit(b"e2", 1, *range(BUCKETS))
    until(lambda: len(one.done) == len(two.done) == BUCKETS)
    assert_sums([one, two], one, two)


def test_members_that_nccl_does_not_connect_in_time_are_an_error_of_the_epoch_only(
    team: Callable[..., list[Member]], tmp_path: Path
) -> None:
    (tmp_path / "hang-init").touch()
    one, two = members = team(2, join_s=0.2)
    for me, member in enumerate(members):
        member.enter(b"e1", 2, me)
        member.submit(b"e1", 1, *range(BUCKETS))
    until(lambda: one.failed and two.failed)
    assert one.failed == [(b"e1", "NCCL did not connect the 2 members within 0.2 s")]
    assert one.device.live() == 0, "it is aborted at once, not with the next epoch"
    (tmp_path / "hang-init").unlink()
    for me, member in enumerate(members):
        member.enter(b"e2", 2, me)
        member.submit(b"e2", 1, *range(BUCKETS))
    until(lambda: len(one.done) == len(two.done) == BUCKETS)
    assert_sums(members, *members)


def test_an_abort_that_does_not_return_is_the_end_of_the_process(
    team: Callable[..., list[Member]], tmp_path: Path
) -> None:
    one, two = members = team(2, abort_s=0.2)
    for me, member in enumerate(members):
        member.enter(b"e1", 2, me)
    until(lambda: one.device.live() == 2)
    (tmp_path / "hang-abort").touch()
    began = time.monotonic()
    one.enter(b"e2", 1, 0)
    assert time.monotonic() - began < 0.2, "who orders the epoch does not wait"
    until(lambda: one.died)
    assert "did not abort a communicator within 0.2 s" in one.died[0]
    assert not two.died
    (tmp_path / "hang-abort").unlink()


def test_what_cannot_be_reduced_by_nccl_is_refused_with_the_next_thing_to_do() -> None:
    with pytest.raises(SettingsError, match="with parameters on cpu: NCCL reduces gradients on cuda only") as cpu:
        device_for(MODEL.parameters())
    assert "data_plane='host'" in cpu.value.hint
    device = HostDevice(build())
    for asked in ("host", "recompute"):
        with pytest.raises(SettingsError, match=f"retain='{asked}' with data_plane='nccl'"):
            retain_there(PLAN, device, asked, 0, unpinned)
    with pytest.raises(SettingsError, match="more than retain_bytes=100"):
        retain_there(PLAN, device, "auto", 100, unpinned)
    kept, retention = retain_there(PLAN, device, "auto", 0, unpinned)
    assert retention.mode == "device"
    assert kept.keeps
    kept[0].fill_(2.0)
    assert kept.squares(0) == 4.0 * kept[0].numel()


def test_gradients_are_gathered_on_the_device_behind_its_own_copies_and_zeros_in_their_turn() -> None:
    """The lane that takes gradients to the host with the other plane takes them into buffers on the device here."""
    torch.manual_seed(0)
    model, lane = TwoHeads(), LateLane()
    plan = make_plan(model, 100)
    retained, announced = OnDevice(plan, HostDevice(build())), Announced()
    taker = GradientTaker(model, plan, announced, retained, {torch.device("cpu"): lane})
    announced.taker = taker
    x = torch.randn(5, 4)
    for weight in (3.0, 0.0):
        announced.seen.clear()
        lane.flowing = False
        taker.begin(Mode.TAKE)
        taker.weight = weight
        model(x).backward()
        assert not announced.seen, "the copies, and the zeros of a weight of 0, have not been made"
        finish(taker, lane)
        announced.wait(len(plan.all_buckets))
        expected = reference(x)
        for bucket in plan.buckets:
            for slot in bucket.slots:
                got = announced.seen[bucket.index][slot.offset : slot.offset + slot.count].view(slot.shape)
                assert torch.equal(got, expected[slot.name] * weight), slot.name
        squares = sum(float((g * weight).double().square().sum()) for g in expected.values())
        assert taker.own_norm == pytest.approx((squares**0.5) / (weight or 1.0), rel=1e-5)
        assert taker.inputs_finite()
    assert float(taker.retained[plan.tally.index][1]) == 5.0
    taker.close()


def test_a_result_is_not_replaced_by_a_replay_while_a_copy_of_an_epoch_that_is_over_writes_it(
    team: Callable[..., list[Member]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was put out replays what others committed, into the same buffers."""
    one = team(1)[0]
    copying, may_end = threading.Event(), threading.Event()

    class Late:
        def wait(self) -> None:
            copying.set()
            assert may_end.wait(30)
            one.reduced[0].fill_(GARBAGE)

    monkeypatch.setattr(one.device, "copy", lambda target, source: Late())
    one.enter(b"e1", 1, 0)
    one.submit(b"e1", 1, 0)
    assert copying.wait(30)
    one.plane.abort()
    quiet = threading.Event()

    def replay() -> None:
        one.plane.quiet()
        quiet.set()
        one.reduced[0].fill_(7.0)

    replaying = threading.Thread(target=replay)
    replaying.start()
    assert not quiet.wait(0.1)
    may_end.set()
    replaying.join(30)
    assert torch.equal(one.reduced[0], torch.full_like(one.reduced[0], 7.0))


def test_a_device_that_fails_is_told_instead_of_waited_for(
    team: Callable[..., list[Member]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = team(1)[0]

    def broken(target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(one.device, "copy", broken)
    one.enter(b"e1", 1, 0)
    one.submit(b"e1", 1, 0)
    until(lambda: one.failed)
    assert "illegal memory access" in one.failed[0][1]
    with pytest.raises(FtarError, match="were not reduced on the device: an illegal memory access"):
        one.plane.quiet()
    assert not one.done
