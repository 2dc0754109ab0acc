"""Gradients of a device, through the control code that CUDA runs, with a device whose copies are late: until the test
lets them happen a copy's target holds garbage, so whoever reads one early gets a wrong sum."""

import threading

import pytest
import torch

from ftar_core.errors import FtarError, SettingsError
from ftar_core.training.devices import Event, lanes_of
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.plan import make_plan
from tests.training.test_gradients import TwoHeads, reference

GARBAGE = 12345.0


class LateEvent:
    def __init__(self, lane: "LateLane", position: int) -> None:
        self._lane, self._position = lane, position

    def wait(self) -> None:
        with self._lane.changed:
            assert self._lane.changed.wait_for(lambda: self._lane.made >= self._position or self._lane.broken, 30)
            if self._lane.broken:
                raise RuntimeError("an illegal memory access was encountered")


class LateLane:
    """A queue of copies on memory of the CPU. Nothing is copied before `let`, then in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        self.made = 0
        self.flowing = self.broken = False
        self.joined: list[Event] = []

    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def _put(self, target: torch.Tensor, source: torch.Tensor, weight: float) -> None:
        with self.changed:
            target.fill_(GARBAGE)
            self.queue.append((target, source, weight))
            self.changed.notify_all()
        if self.flowing:
            self.let()

    def fetch(self, target: torch.Tensor, source: torch.Tensor, weight: float) -> object:
        self._put(target, source, weight)
        return source

    def clear(self, target: torch.Tensor) -> None:
        self._put(target, torch.zeros_like(target), 1.0)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._put(target, source, 1.0)

    def bring(self, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        there = torch.empty(source.shape, dtype=like.dtype)
        self._put(there, source, 1.0)
        return there

    def let(self, count: int = 1 << 30) -> None:
        """So many copies happen now."""
        with self.changed:
            for target, source, weight in self.queue[self.made : self.made + count]:
                target.copy_(source if weight == 1.0 else source * weight)
                self.made += 1
            self.changed.notify_all()

    def fail(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()

    def record(self) -> Event:
        with self.changed:
            return LateEvent(self, len(self.queue))

    def join(self, event: Event) -> None:
        self.joined.append(event)


class Announced:
    """What the ring would read, at the moment it is told of a bucket."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.seen: dict[int, torch.Tensor] = {}
        self.taker: GradientTaker | None = None

    def __call__(self, bucket: int) -> None:
        assert self.taker is not None
        with self.changed:
            self.seen[bucket] = self.taker.retained[bucket].clone()
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seen) >= count, 30)


def make() -> tuple[TwoHeads, GradientTaker, Announced, LateLane]:
    torch.manual_seed(0)
    model, announced, lane = TwoHeads(), Announced(), LateLane()
    taker = GradientTaker(model, make_plan(model, 100), announced, lanes={torch.device("cpu"): lane})
    announced.taker = taker
    return model, taker, announced, lane


def finish(taker: GradientTaker, lane: LateLane) -> None:
    lane.flowing = True
    lane.let()
    taker.finish(tokens=5, loss=2.5)


def test_backward_waits_for_no_copy_and_no_bucket_is_read_before_its_own() -> None:
    model, taker, announced, lane = make()
    taker.begin(Mode.TAKE)
    taker.weight = 3.0
    x = torch.randn(5, 4)
    model(x).backward()  # returns although nothing is copied
    assert lane.made == 0
    assert lane.queue
    assert not announced.seen
    lane.let(len(lane.queue) - 1)  # all but the last copy
    finish(taker, lane)
    assert len(announced.seen) == len(taker.plan.all_buckets)
    expected = reference(x)
    for bucket in taker.plan.buckets:
        for slot in bucket.slots:
            got = announced.seen[bucket.index][slot.offset : slot.offset + slot.count].view(slot.shape)
            assert torch.equal(got, expected[slot.name] * 3.0), slot.name
    taker.close()


def test_a_bucket_is_announced_while_later_copies_are_under_way() -> None:
    model, taker, announced, lane = make()
    taker.begin(Mode.TAKE)
    model(torch.randn(5, 4)).backward()
    for copies in range(len(lane.queue) + 1):
        lane.let(1)
        if copies + 1 < len(lane.queue) and announced.seen:
            break
    with announced.changed:
        assert all((values != GARBAGE).all() for values in announced.seen.values())
    finish(taker, lane)
    announced.wait(len(taker.plan.all_buckets))
    assert all((values != GARBAGE).all() for values in announced.seen.values())
    taker.close()


def test_the_results_are_not_written_while_they_are_copied_to_the_device() -> None:
    model, taker, announced, lane = make()
    taker.begin(Mode.TAKE)
    model(torch.randn(5, 4)).backward()
    finish(taker, lane)
    for mine, result in zip(taker.retained, taker.reduced, strict=True):
        result.copy_(mine)
    announced.seen.clear()
    lane.flowing = False
    before = lane.made
    taker.give_back()
    assert lane.made == before, "the host waits for nothing"
    assert lane.joined, "the device does"
    taker.begin(Mode.TAKE)
    # The ring writes a result buffer once its bucket is announced: none may be, though this one needs no copy at all.
    closing = threading.Thread(target=lambda: taker.finish(tokens=0, loss=None, weight=0.0))
    closing.start()
    closing.join(0.1)
    assert not announced.seen
    lane.let()
    closing.join(90)
    assert len(announced.seen) == len(taker.plan.all_buckets)
    taker.close()


def test_a_step_that_is_left_in_its_middle_announces_nothing_in_the_next() -> None:
    model, taker, announced, lane = make()
    taker.begin(Mode.TAKE)
    model(torch.full((5, 4), 2.0)).backward()
    copies = len(lane.queue)
    assert copies
    beginning = threading.Thread(target=lambda: taker.begin(Mode.TAKE))
    beginning.start()
    beginning.join(0.1)
    assert beginning.is_alive(), "its copies are under way into the buffers of the next step"
    lane.let()
    beginning.join(90)
    assert not beginning.is_alive()
    assert not announced.seen
    x = torch.randn(5, 4)
    model(x).backward()
    finish(taker, lane)
    slot = taker.plan.slots["first.weight"]
    got = announced.seen[slot.bucket][slot.offset : slot.offset + slot.count].view(slot.shape)
    assert torch.equal(got, reference(x)["first.weight"])
    taker.close()


def test_a_device_that_fails_is_one_clear_error_and_nothing_is_announced() -> None:
    model, taker, announced, lane = make()
    taker.begin(Mode.TAKE)
    model(torch.randn(5, 4)).backward()
    lane.fail()
    with pytest.raises(FtarError, match="did not come from the device: an illegal memory access"):
        taker.finish(tokens=5, loss=None)
    assert not announced.seen
    taker.close()


def test_host_memory_has_no_lane_and_devices_without_values_are_refused() -> None:
    assert lanes_of(TwoHeads().parameters()) == {}
    with torch.device("meta"), pytest.raises(SettingsError, match="meta device"):
        lanes_of(TwoHeads().parameters())


def test_tensors_in_host_memory_start_no_thread() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    taker = GradientTaker(model, make_plan(model, 100), lambda bucket: None, lanes={})
    before = threading.active_count()
    taker.begin(Mode.TAKE)
    model(torch.randn(5, 4)).backward()
    taker.finish(tokens=5, loss=None)
    assert threading.active_count() == before
    taker.close()
