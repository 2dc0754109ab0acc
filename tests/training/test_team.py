"""Replicas of two ranks each, sharded by FSDP2: they train as one process would, and live and die whole."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from ports import claim_port
from torch import nn

from ftar_core.training.sampling import batch_indices

from .conftest import Job, until
from .sharded import MAX_NORM, model_of
from .trainer import SAMPLES, data

RANKS = ("0", "1")


def twin(steps: list[list[int]], *, width: int, batch_size: int) -> tuple[list[float], nn.Module]:
    """The same training in one process, on all dealt batches together, and its losses: over all ranks of all
    replicas, although each rank tells that of its share only."""
    inputs, targets = data()
    model = model_of(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batches in steps:
        indices = [batch_indices(batch, batch_size, SAMPLES, 5) for batch in batches]
        everything = torch.tensor([index for batch in indices for index in batch])
        optimizer.zero_grad()
        loss = (model(inputs[everything]) - targets[everything]).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return losses, model


def assert_finished(job: Job, *replicas: str) -> None:
    job.assert_finished(*(f"{name}/{rank}" for name in replicas for rank in RANKS))


def assert_identical(job: Job, *replicas: str) -> None:
    """Rank by rank: every rank holds another shard."""
    for rank in RANKS:
        job.assert_identical(*(f"{name}/{rank}" for name in replicas))
    shards = [job.lines(f"{replicas[0]}/{rank}", "end")[-1]["params_digest"] for rank in RANKS]
    assert len(set(shards)) == 2


def restart(job: Job, name: str, **options: object) -> None:
    """As a supervisor does: all ranks at once, after all have ended."""
    for rank in RANKS:
        assert job.exit_code(f"{name}/{rank}") is not None
    job.start_team(name, **options)


def test_two_sharded_replicas_train_as_one_process_would_on_both_batches(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start_team("r0", "r1", steps=25, step_ms=2)
    assert_finished(job, "r0", "r1")
    assert_identical(job, "r0", "r1")
    losses, model = twin([[2 * s, 2 * s + 1] for s in range(25)], width=5, batch_size=4)
    for name in ("r0/0", "r0/1", "r1/0"):
        lines = job.lines(name, "step")
        assert [line["step"] for line in lines] == list(range(1, 26))
        assert all(line["contributors"] == ["r0", "r1"] for line in lines)
        seen = torch.tensor([line["loss"] for line in lines])
        torch.testing.assert_close(seen, torch.tensor(losses), rtol=1e-3, atol=1e-4)
    whole = torch.load(job.path / "r0.0.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_a_killed_rank_takes_its_replica_down_and_only_that_and_the_replica_comes_back(job: Job) -> None:
    job.coordinator(replicas=3)
    job.start_team("r0", "r1", "r2", steps=0, step_ms=30)
    job.wait_step("r0", 10)
    job.kill("r1/1")
    assert job.exit_code("r1/0") in (1, 75), job.logs()
    until(lambda: job.lines("r0", "step")[-1]["contributors"] == ["r0", "r2"], job.logs)
    restart(job, "r1", steps=0, step_ms=30)
    job.wait_contributes("r1", 2)
    job.kill("r2/0")
    assert job.exit_code("r2/1") in (1, 75), job.logs()
    until(lambda: job.lines("r0", "step")[-1]["contributors"] == ["r0", "r1"], job.logs)
    restart(job, "r2", steps=0, step_ms=30)
    job.wait_contributes("r2", 2)
    with job.operator() as operator:
        assert operator.request("finish").code == "ok"
    assert_finished(job, "r0", "r1", "r2")
    assert_identical(job, "r0", "r1", "r2")
    steps = job.steps("r0")
    assert steps == list(range(1, steps[-1] + 1)), "the survivor lost no step"
    for rank in RANKS:
        assert any(line["replayed"] for line in job.lines(f"r1/{rank}", "step"))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_were_given_different_steps_meet_although_steps_take_a_millisecond(job: Job, seed: int) -> None:
    """Snapshots of the two ranks are often of different steps then, and all fetch anew until they are not."""
    job.coordinator(replicas=2)
    job.start_team("r0", "r1", steps=0, step_ms=1)
    job.wait_step("r0", 20)
    for life in range(2, 6):
        job.kill(f"r1/{(seed + life) % 2}")
        restart(job, "r1", steps=0, step_ms=1)
        job.wait_contributes("r1", life)
    with job.operator() as operator:
        assert operator.request("finish").code == "ok"
    assert_finished(job, "r0", "r1")
    assert_identical(job, "r0", "r1")


def test_a_drained_replica_leaves_with_all_its_ranks(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start_team("r0", "r1", steps=60, step_ms=20)
    job.wait_step("r0", 5)
    with job.operator() as operator:
        assert operator.request("drain", replica="r1", reason="test").code == "ok"
    assert [job.exit_code(f"r1/{rank}") for rank in RANKS] == [76, 76], job.logs()
    assert_finished(job, "r0")
    assert all(line["retries"] == 0 for line in job.lines("r0", "step"))


def test_a_frozen_rank_is_found_out_by_its_own_silence_and_its_replica_put_out(job: Job) -> None:
    """Rank 0 lives, speaks with the coordinator, and waits in a collective."""
    job.coordinator(replicas=2, options=("--suspect-after", "2s", "--evict-after", "4s"))
    job.start_team("r0", "r1", steps=0, step_ms=20)
    job.wait_step("r0", 5)
    pid = job.replicas["r1/1"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert job.exit_code("r1/0") == 75, job.logs()
    assert "rank 1 is silent" in (job.path / "r1.0.log").read_text()
    job.wait_step("r0", max(job.steps("r0")) + 3)
    job.kill("r1/1")


def test_a_replica_of_one_rank_is_refused_beside_replicas_of_two(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start_team("r0", steps=0, step_ms=20)
    job.wait_step("r0", 3)
    job.start("r1", steps=0)
    assert job.exit_code("r1") == 77, job.logs()
    assert "r1 has 1 rank, the job's replicas have 2 ranks each" in (job.path / "r1.log").read_text()
    job.wait_step("r0", max(job.steps("r0")) + 3)


def test_sharded_replicas_of_another_model_are_refused_on_all_ranks_with_the_whole_shapes(job: Job) -> None:
    job.coordinator(replicas=2, options=("--start-timeout", "1s"))
    job.start_team("r0", steps=0, step_ms=20)
    job.wait_step("r0", 1)
    job.start_team("r1", steps=0, width=6)
    assert [job.exit_code(f"r1/{rank}") for rank in RANKS] == [77, 77], job.logs()
    for rank in RANKS:
        log = (job.path / f"r1.{rank}.log").read_text()
        assert "parameter 2.weight has shape (1, 6), on r0 (1, 5)" in log
        assert "Traceback" not in log


def test_a_weight_that_differs_between_the_ranks_of_a_replica_is_named_before_it_spoils_anything(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start_team("r0", steps=10, step_ms=2, odd_weight_on=1)
    assert {job.exit_code(f"r0/{rank}") for rank in RANKS} == {2}, job.logs()
    text = (job.path / "r0.0.log").read_text() + (job.path / "r0.1.log").read_text()
    assert "session.weight must be the same on all ranks of a replica" in text
    assert job.steps("r0") == [1, 2]


def test_an_exception_in_the_update_of_one_rank_ends_its_replica(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start_team("r0", steps=10, step_ms=2, fail_update_at=4)
    assert job.exit_code("r0/1") == 1, job.logs()
    assert job.exit_code("r0/0") in (1, 75), job.logs()
    assert "RuntimeError: on purpose" in (job.path / "r0.1.log").read_text()


def test_ranks_without_a_process_group_find_each_other_at_the_leader_s_address(job: Job) -> None:
    """Not sharded: each rank trains a model of its own. That is allowed, and what tensor parallel ranks look like."""
    job.coordinator(replicas=1)
    job.start_team("r0", steps=5, sharded=False, environment={"FTAR_LEADER": f"127.0.0.1:{claim_port()}"})
    assert_finished(job, "r0")
