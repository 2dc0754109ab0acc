"""Real replicas whose gradients go over the fake libnccl: the same training, the same commits, the same rules."""

from __future__ import annotations

import signal

import pytest
import torch

from ftar_core.training.sampling import batch_indices
from tests.training.conftest import until
from tests.training.trainer import SAMPLES, data, model_of

from .conftest import NcclJob

KILL = "bucket,bucket=1,step=12,action=kill"


def test_two_replicas_train_over_nccl_as_one_process_would(job: NcclJob) -> None:
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=20, step_ms=2, momentum=0.0)
    job.assert_finished("r0", "r1")
    job.assert_identical("r0", "r1")
    inputs, targets = data()
    twin = model_of(24, 0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        indices = torch.tensor([i for b in (2 * step, 2 * step + 1) for i in batch_indices(b, 4, SAMPLES, 5)])
        optimizer.zero_grad()
        loss = (twin(inputs[indices]) - targets[indices]).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    lines = job.lines("r0", "step")
    assert [line["step"] for line in lines] == list(range(1, 21))
    torch.testing.assert_close(torch.tensor([line["loss"] for line in lines]), torch.tensor(losses))
    job.assert_none_left("r0", "r1")


def test_killed_in_the_middle_of_an_all_reduce_survivors_keep_the_step_and_the_replica_comes_back(job: NcclJob) -> None:
    """Then one is drained, and the last stands alone, without a communicator."""
    job.coordinator(replicas=3)
    job.start("r0", "r2", steps=0, step_ms=10)
    job.start("r1", environment={"FTAR_BREAKPOINTS": KILL}, steps=0, step_ms=10)
    assert job.exit_code("r1") == -signal.SIGKILL
    job.wait_step("r0", 16)
    lines = {line["step"]: line for line in job.lines("r0", "step")}
    assert lines[11]["contributors"] == ["r0", "r1", "r2"]
    broken = min(step for step, line in lines.items() if line["contributors"] == ["r0", "r2"])
    assert broken == 12
    assert lines[broken]["retries"] == 1, "reduced again, not computed again"
    job.start("r1", steps=0, step_ms=10)
    job.wait_contributes("r1", 2)
    with job.operator() as operator:
        assert operator.request("drain", replica="r2", reason="test").code == "ok"
    assert job.exit_code("r2") == 76, job.logs()
    job.finish("r0", "r1")
    steps = job.steps("r0")
    assert steps == list(range(1, steps[-1] + 1)), "no step lost, none twice"
    assert any(line["replayed"] for line in job.lines("r1", "step"))
    job.assert_none_left("r0", "r1", "r2")
    epochs = {line["epoch"] for line in job.lines("r0", "epoch") if len(line["contributors"]) > 1}
    made = [entry for entry in job.communicators("r0") if entry[1] == "made"]
    assert len(made) == len(epochs), "one for each epoch"


def test_a_survivor_that_is_left_alone_goes_on_without_a_communicator(job: NcclJob) -> None:
    job.coordinator(replicas=2)
    job.start("r0", steps=0, step_ms=10)
    job.start("r1", environment={"FTAR_BREAKPOINTS": KILL}, steps=0, step_ms=10)
    assert job.exit_code("r1") == -signal.SIGKILL
    job.wait_step("r0", 20)
    assert job.communicators("r0")[-1][1:] == ("aborted", 0)
    job.start("r1", steps=0, step_ms=10)
    job.wait_contributes("r1", 2)
    job.finish("r0", "r1")
    job.assert_none_left("r0", "r1")


def test_a_restart_of_the_coordinator_leaves_the_communicator_and_the_bits_as_they_are(job: NcclJob) -> None:
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=0, step_ms=10)
    job.wait_step("r0", 5)
    job.kill_coordinator()
    job.restart_coordinator()
    job.finish("r0", "r1")
    steps = job.steps("r0")
    assert steps == list(range(1, steps[-1] + 1))
    job.assert_none_left("r0", "r1")


@pytest.mark.parametrize("where", ["hang-init", "hang-reduce"])
def test_nccl_that_hangs_is_aborted_when_the_member_that_hangs_it_dies(job: NcclJob, where: str) -> None:
    """r1's part of NCCL hangs; r1 lives and beats, so everybody waits, until it is killed."""
    job.coordinator(replicas=3)
    job.switch(f"{where}.r1")
    job.start("r0", "r1", "r2", steps=0, step_ms=10)
    until(lambda: any(what == "made" for _, what, _ in job.communicators("r1")), job.logs)
    job.kill("r1")
    job.wait_step("r0", 4)
    assert job.lines("r0", "step")[0]["contributors"] == ["r0", "r2"]
    job.switch(f"{where}.r1", on=False)
    job.start("r1", steps=0, step_ms=10)
    job.wait_contributes("r1", 2)
    job.finish("r0", "r1", "r2")
    job.assert_none_left("r0", "r1", "r2")


@pytest.mark.parametrize("what", ["async-error", "fail-init"])
def test_an_error_of_nccl_while_all_members_live_costs_one_replica_for_a_while(job: NcclJob, what: str) -> None:
    job.coordinator(replicas=2)
    if what == "async-error":
        job.start("r0", "r1", steps=0, step_ms=10)
        job.wait_step("r0", 5)
        job.switch(f"{what}.r1")
    else:
        job.switch(f"{what}.r1")
        job.start("r0", "r1", steps=0, step_ms=10)
    job.used_up(f"{what}.r1")
    assert job.exit_code("r1") == 75, job.logs()
    assert "NCCL failed while all members were there" in (job.path / "r1.log").read_text()
    job.wait_step("r0", max(job.steps("r0"), default=0) + 3)
    job.start("r1", steps=0, step_ms=10)
    job.wait_contributes("r1", 2)
    job.finish("r0", "r1")
    steps = job.steps("r0")
    assert steps == list(range(1, steps[-1] + 1))
    job.assert_none_left("r0", "r1")
