"""Copies of a state that is on a device, through the control code that CUDA runs, with a device whose copies are
late."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ftar_core.training import snapshots
from ftar_core.training.snapshots import LANE_AHEAD, Copier, Held
from ftar_core.training.state import LiveState, look_at_state
from ftar_core.wire.ids import NO_EPOCH
from tests.training.test_staging import GARBAGE, LateLane

ELEMENTS = 8  # of a slice


class Bench:
    """A model whose memory is said to be a device's."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))  # with a scalar, and a tensor of integers
        self.lane = LateLane()
        self.done: list[Held] = []
        self.copier = Copier(self.done.append, lambda device: self.lane)

    def live(self) -> LiveState:
        return look_at_state({"model": self.model})

    def start(self, step: int = 1) -> LiveState:
        live = self.live()
        self.copier.start(live, step, NO_EPOCH, patience=1.0)
        return live

    def settled(self, wait_s: float = 0.0) -> threading.Thread:
        thread = threading.Thread(target=self.copier.settle, args=(wait_s, wait_s), daemon=True)
        thread.start()
        return thread


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(snapshots, "LANE_BYTES", ELEMENTS * 4)
    bench = Bench()
    yield bench
    bench.lane.flowing = True
    bench.lane.let()
    bench.copier.close()


def test_a_state_comes_over_whole_and_slices_do_not_wait_for_each_other(bench: Bench) -> None:
    live = bench.start()
    with bench.lane.changed:
        assert bench.lane.changed.wait_for(lambda: len(bench.lane.queue) > LANE_AHEAD, 30)
    assert bench.done == []
    bench.lane.flowing = True
    bench.lane.let()
    bench.settled(30.0).join(60)
    (held,) = bench.done
    for mine, theirs in zip(held.state.tensors, live.tensors, strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, theirs)
    assert len(bench.lane.queue) > 100 // ELEMENTS


def test_an_update_waits_for_what_is_under_way_and_for_nothing_more(bench: Bench) -> None:
    """A copy that is abandoned has slices in the device's queue: they read what the update would write."""
    live = bench.start()
    with bench.lane.changed:
        assert bench.lane.changed.wait_for(lambda: len(bench.lane.queue) > LANE_AHEAD, 30)
    update = bench.settled()
    update.join(0.2)
    assert update.is_alive(), "slices are under way"
    queued = len(bench.lane.queue)
    bench.lane.let()
    update.join(30)
    assert not update.is_alive()
    assert bench.done == []
    assert len(bench.lane.queue) <= queued + 1 < sum(tensor.numel() for tensor in live.tensors) // ELEMENTS
    assert "abandoned 1 times" in bench.copier.text
    with torch.no_grad():
        for parameter in bench.model.parameters():
            parameter.fill_(7.0)
    bench.lane.flowing = True
    again = bench.start(2)
    bench.lane.let()
    bench.settled(30.0).join(60)
    (held,) = bench.done
    assert held.step == 2
    assert all(torch.equal(a, b) for a, b in zip(held.state.tensors, again.tensors, strict=True))
    assert not any((tensor == GARBAGE).any() for tensor in held.state.tensors)


def test_a_device_that_fails_costs_the_copy_and_hangs_nobody(bench: Bench) -> None:
    bench.start()
    with bench.lane.changed:
        assert bench.lane.changed.wait_for(lambda: bool(bench.lane.queue), 30)
    bench.lane.fail()
    update = bench.settled()
    update.join(30)
    assert not update.is_alive()
    assert bench.done == []
    assert bench.copier.text
