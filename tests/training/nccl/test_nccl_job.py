"""Real replicas whose gradients go over the fake libnccl: the same training, the same commits, the same rules."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from ftar_core.training.sampling import batch_indices
from tests.training import test_spares as spares
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


def test_a_drain_with_a_spare_changes_not_a_bit_and_the_spare_joins_the_next_communicator(job: NcclJob) -> None:
    job.coordinator(replicas=2, options=("--spares", "1"))
    job.start("r0", "r1", "r2", steps=0, step_ms=25)
    spares.await_state(job, "r2", "spare")
    assert not job.communicators("r2"), "a spare is in none"
    spares.drain(job, "r1")
    spares.await_state(job, "r2", "contributing")
    assert job.exit_code("r1") == 76, job.logs()
    job.finish("r0", "r2")
    assert set(spares.counts(job, "r0").values()) == {2}, "the contributors did not become fewer"
    job.assert_none_left("r0", "r1", "r2")


def test_an_abort_that_hangs_ends_its_process_with_the_reason_and_the_others_go_on(job: NcclJob) -> None:
    """As a kernel in a driver that is stuck: r2 is lost, and r1 cannot get out of the all-reduce with it."""
    job.coordinator(replicas=3)
    job.start("r0", "r1", "r2", steps=0, step_ms=10, nccl_abort_s=1.0)
    job.wait_step("r0", 5)
    job.switch("hang-abort.r1")
    job.kill("r2")
    assert job.exit_code("r1") == 75, job.logs()
    assert "NCCL did not abort a communicator within 1 s" in (job.path / "r1.log").read_text()
    job.switch("hang-abort.r1", on=False)
    job.start("r1", steps=0, step_ms=10)
    job.wait_contributes("r1", 2)
    job.finish("r0", "r1")
    steps = job.steps("r0")
    assert steps == list(range(1, steps[-1] + 1))
    job.assert_none_left("r0", "r1")


def test_a_replica_with_another_data_plane_or_another_nccl_is_refused_with_the_difference(job: NcclJob) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=0, step_ms=10)
    job.wait_step("r0", 2)
    job.start("r1", environment={"FTAR_DATA_PLANE": "host"}, steps=0)
    job.start("r2", environment={"FAKE_NCCL_VERSION": "22805"}, steps=0)
    job.start("r3", environment={"FTAR_DATA_PLANE": "ncll"}, steps=0)
    assert job.exit_code("r1") == job.exit_code("r2") == 77, job.logs()
    assert "r1 runs with FTAR_DATA_PLANE=host, the job's replicas with nccl" in (job.path / "r1.log").read_text()
    assert "r2 runs nccl 2.28.5, the job's replicas run 2.27.3" in (job.path / "r2.log").read_text()
    assert job.exit_code("r3") == 2
    text = (job.path / "r3.log").read_text()
    assert "FTAR_DATA_PLANE=ncll: no such data plane" in text
    assert "write one of: host, nccl" in text


def test_groups_inside_a_replica_are_not_touched_by_an_epoch_and_end_with_their_replica(job: NcclJob) -> None:
    """Replicas of two ranks with a process group between them (FSDP2 over gloo). A rank dies: its replica ends at once,
    although its other rank is in a collective that nobody will finish; survivors keep their groups and communicators
    of their rings are made anew; the replica comes back with a group of its own."""
    job.coordinator(replicas=3)
    job.start_team("r0", "r1", "r2", steps=0, step_ms=30)
    job.wait_step("r0", 8)
    pids = [job.replicas[f"r0/{rank}"].pid for rank in (0, 1)]
    job.kill("r1/1")
    began = time.monotonic()
    assert job.exit_code("r1/0") in (1, 75), job.logs()
    assert time.monotonic() - began < 30, "gloo alone would wait for half an hour"
    until(lambda: job.lines("r0", "step")[-1]["contributors"] == ["r0", "r2"], job.logs)
    job.start_team("r1", steps=0, step_ms=30)
    job.wait_contributes("r1", 2)
    with job.operator() as operator:
        assert operator.request("finish").code == "ok"
    job.assert_finished(*(f"{name}/{rank}" for name in ("r0", "r1", "r2") for rank in (0, 1)))
    for rank in (0, 1):
        job.assert_identical(*(f"{name}/{rank}" for name in ("r0", "r1", "r2")))
        assert job.replicas[f"r0/{rank}"].pid == pids[rank]
        log = (job.path / f"r0.{rank}.log").read_text()
        assert "rror" not in log, log
    for name in ("r0", "r2"):
        epochs = [line for line in job.lines(name, "epoch") if len(line["contributors"]) > 1]
        said = job.communicators(name)
        for pid in {pid for pid, _, _ in said}:
            assert sum(what == "made" for who, what, _ in said if who == pid) == len(epochs), "one a ring and epoch"
    steps = job.steps("r0")
    assert steps == list(range(1, steps[-1] + 1))
