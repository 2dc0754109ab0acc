"""Retained gradients: what is chosen, what happens without memory for them, and a step that is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftar_core.errors import SettingsError
from ftar_core.training import retention
from ftar_core.training.exchange import Exchange, News
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.plan import make_plan
from ftar_core.training.retention import Kept, Staged, choose, inputs_for

from .conftest import Job, until
from .test_exchange import WrittenRing, commit, enter, key

# --- what is chosen


@pytest.mark.parametrize(
    ("asked", "limit", "available", "on_device", "mode"),
    [
        ("auto", 0, 0, False, "device"),  # memory is not known: tried
        ("auto", 0, 1000, False, "device"),
        ("auto", 0, 1000, True, "host"),
        ("auto", 0, 99, False, "recompute"),
        ("auto", 99, 1000, False, "recompute"),
        ("auto", 99, 1000, True, "recompute"),
        ("auto", 100, 100, False, "device"),
        ("device", 0, 1000, False, "device"),
        ("device", 50, 1000, False, "recompute"),
        ("host", 0, 1000, True, "host"),
        ("host", 50, 1000, False, "recompute"),
        ("recompute", 0, 1000, False, "recompute"),
    ],
)
def test_the_first_that_there_is_memory_for(asked: str, limit: int, available: int, on_device: bool, mode: str) -> None:
    found = choose(asked, nbytes=100, limit=limit, available=available, on_device=on_device, ranks=1)
    assert found.mode == mode
    assert found.fallback is (mode == "recompute" and asked != "recompute")
    assert found.reason


@pytest.mark.parametrize(
    ("asked", "limit", "on_device", "ranks", "reason"),
    [
        ("all", 0, False, 1, "one of auto, device, host, recompute"),
        ("auto", -1, False, 1, "retain_bytes=-1"),
        ("device", 0, True, 1, "reduced from host memory"),
        ("recompute", 0, False, 2, "cannot agree on running a batch again"),
        ("host", 50, False, 2, "2 ranks a replica cannot run a batch again"),
    ],
)
def test_what_cannot_be_is_refused(asked: str, limit: int, on_device: bool, ranks: int, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        choose(asked, nbytes=100, limit=limit, available=1000, on_device=on_device, ranks=ranks)


def test_no_memory_for_the_buffers_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_memory(plan: object, host: object) -> Kept:
        raise MemoryError("can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr(retention, "Kept", without_memory)
    model = nn.Linear(4, 4)
    inputs, found = inputs_for(model, make_plan(model), "auto", 0, 1)
    assert not inputs.keeps
    assert (found.mode, found.fallback) == ("recompute", True)
    assert "can't allocate memory" in caplog.text


# --- memory that serves one bucket after the other


def small() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def test_buckets_that_are_reduced_give_their_memory_to_the_next() -> None:
    model = small()
    plan = make_plan(model, bucket_bytes=300)
    inputs = Staged(plan)
    kept = Kept(plan)
    sums: dict[int, torch.Tensor] = {}

    def on_bucket(bucket: int) -> None:
        sums[bucket] = taker.retained[bucket].clone()
        inputs.release(bucket)  # reduced at once

    taker = GradientTaker(model, plan, on_bucket, inputs)
    twin = GradientTaker(twin_model := small(), plan, lambda bucket: None, kept)
    for one, of in ((taker, model), (twin, twin_model)):
        one.begin(Mode.TAKE)
        of(torch.ones(2, 8)).sum().backward()
        one.finish(tokens=2.0, loss=1.0)
    assert len(sums) == len(plan.all_buckets) > 3
    assert all(torch.equal(sums[bucket], kept[bucket]) for bucket in sums)
    assert inputs.most_bytes <= 2 * max(bucket.nbytes for bucket in plan.buckets) < kept.most_bytes
    assert taker.inputs_finite()


def test_gradients_that_are_not_finite_are_still_known_when_they_are_gone() -> None:
    model = small()
    inputs = Staged(plan := make_plan(model, bucket_bytes=300))
    taker = GradientTaker(model, plan, inputs.release, inputs)
    taker.begin(Mode.TAKE)
    (model(torch.ones(2, 8)).sum() * float("nan")).backward()
    taker.finish(tokens=2.0, loss=None)
    assert not taker.inputs_finite()
    taker.begin(Mode.TAKE)
    assert taker.inputs_finite()


# --- the exchange


def exchange_of(ring: WrittenRing, released: list[int]) -> Exchange:
    plan = make_plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_bytes=40)
    buffers = [[torch.zeros(b.count, dtype=b.dtype) for b in plan.all_buckets] for _ in range(2)]
    return Exchange(
        job="job",
        replica="r0",
        plan=plan,
        ring=ring,
        retained=buffers[0],
        reduced=buffers[1],
        release=released.append,
    )


def test_a_step_whose_gradients_are_gone_is_begun_again() -> None:
    ring, released = WrittenRing(), []
    exchange = exchange_of(ring, released)
    exchange.enter_epoch(enter(1, 1, "r0", "r1", "r2"))
    assert exchange.wait(0) is News.ROLE
    exchange.begin(exchange.place())
    exchange.produced(0)
    exchange.produced(1)
    exchange.reduced(key(1), 1, 0)
    assert released == [0]
    exchange.enter_epoch(enter(2, 1, "r0", "r1", retry=True))
    assert exchange.wait(0) is News.ROLE
    assert exchange.void
    assert sorted(released) == [0, 0, 1]
    exchange.produced(2)  # of the turn that is void
    assert [s for s in ring.submitted if s[0] == key(2)] == []
    exchange.begin(exchange.place())
    assert not exchange.void
    exchange.produced(0)
    assert ring.submitted[-1] == (key(2), 1, 0)
    assert exchange.place().retries == 1


def test_gradients_that_are_all_still_there_are_used_again() -> None:
    ring, released = WrittenRing(), []
    exchange = exchange_of(ring, released)
    exchange.enter_epoch(enter(1, 1, "r0", "r1", "r2"))
    exchange.wait(0)
    exchange.begin(exchange.place())
    exchange.produced(0)
    exchange.enter_epoch(enter(2, 1, "r0", "r1", retry=True))
    assert not exchange.void
    assert ring.submitted == [(key(1), 1, 0), (key(2), 1, 0)]
    exchange.apply_commit(commit(1, 2))
    assert not exchange.void


# --- a job


def test_a_replica_lost_behind_the_reduction_costs_one_more_pass_and_no_batch(job: Job) -> None:
    """r1 dies when all buckets are reduced everywhere, and the survivors have kept none of their gradients."""
    job.coordinator(replicas=3)
    options = {"steps": 30, "step_ms": 5, "retain_bytes": 16}
    job.start("r0", "r2", **options)
    job.start("r1", environment={"FTAR_BREAKPOINTS": "reduced,step=8,action=kill"}, **options)
    job.assert_finished("r0", "r2")
    job.assert_identical("r0", "r2")
    for name in ("r0", "r2"):
        (retain,) = job.lines(name, "retain")
        assert retain["mode"] == "recompute"
        assert "retain_bytes=16" in retain["reason"]
        lines = job.lines(name, "step")
        assert [line["step"] for line in lines] == list(range(1, 31))
        assert {line["contributors"] == ["r0", "r2"] for line in lines if line["step"] >= 8} == {True}
    again = [line["step"] for line in (*job.lines("r0", "recompute"), *job.lines("r2", "recompute"))]
    assert again, job.logs()
    assert set(again) == {8}
    trained = sorted(batch for line in job.lines("r0", "step") for batch in line["batches"].values())
    assert trained == list(range(len(trained))), "every batch once"
    until(lambda: "gradients are not retained" in job.logs(), "the log says so")
