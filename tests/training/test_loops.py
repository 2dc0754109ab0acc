"""Training loops of many kinds, on real replicas: each trains as one process with all the data would, and survives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ports import claim_port
from torch import nn

from ftar_core.training.sampling import batch_indices

from .conftest import Job, until
from .loops import Block, Branches, loss_of, network, said, start
from .trainer import SAMPLES, data

INPUTS, TARGETS = data()


def dealt(job: Job, name: str) -> list[list[int]]:
    """Batches by step, in the order of slots, as the journal says."""
    return [list(line["batches"].values()) for line in job.lines(name, "step") if not line["replayed"]]


def restart_and_finish(job: Job, name: str, again: Any) -> int:
    """Killed in a job without an end: the others go on for a while, it comes back, the job ends. Returns its steps."""
    job.wait_step("r0", max(job.steps("r0")) + 4)
    again()
    job.wait_contributes(name, 2)
    job.wait_step("r0", max(job.steps("r0")) + 4)
    with job.operator() as operator:
        assert operator.request("finish", reason="test").code == "ok"
    until(lambda: job.lines("r0", "end"), job.logs)
    return int(job.lines("r0", "end")[-1]["step"])


def samples(batches: list[int], size: int = 4) -> torch.Tensor:
    return torch.tensor([index for batch in batches for index in batch_indices(batch, size, SAMPLES, 5)])


def close(got: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-3, atol=1e-4, msg=name)


# --- plain tensors


def test_plain_tensors_across_replicas_while_one_is_killed_and_comes_back(job: Job) -> None:
    job.coordinator(replicas=3)
    start(job, "r0", "r1", "r2", loop="operating", steps=0, step_ms=15)
    job.wait_step("r0", 12)
    job.kill("r1")
    last = restart_and_finish(job, "r1", lambda: start(job, "r1", loop="operating", steps=0, step_ms=15))
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    told = {name: {line["of"]: line for line in said(job, name)} for name in ("r0", "r1", "r2")}
    assert set(told["r0"]) == set(told["r2"]) == set(range(1, last + 1)), "no step lost"
    for step, line in told["r0"].items():
        assert line["values"] == told["r2"][step]["values"], "the same bits on all that go on"
        if step in told["r1"]:
            assert line["values"] == told["r1"][step]["values"]
    batches = dealt(job, "r0")
    for step in (1, 5, last):
        of_step = batches[step - 1]
        count, first, _, *_ = told["r0"][step]["values"]
        assert count == 4 * len(of_step)
        assert first == pytest.approx(float(INPUTS[samples(of_step[:1])].sum()), abs=1e-4)
    assert {len(line["contributors"]) for line in told["r0"].values()} == {2, 3}


def test_replicas_without_a_batch_of_the_last_step_take_part_in_its_plain_operations(job: Job) -> None:
    job.coordinator(replicas=3)
    start(job, "r0", "r1", "r2", loop="operating", steps=0, batch_size=32, extra={"passes": 1})  # 16 batches
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    assert said(job, "r0")[-1]["values"][0] == 32, "one batch in the last step"
    assert [len(batches) for batches in dealt(job, "r0")] == [3, 3, 3, 3, 3, 1]


def test_a_plain_operation_in_the_wrong_place_is_refused_with_the_right_one(job: Job) -> None:
    job.coordinator(replicas=1)
    start(job, "r0", loop="forbidden", steps=3)
    job.assert_finished("r0")
    (line,) = said(job, "r0")
    before, *inside = line["errors"]
    assert "the session has not been started" in before
    assert len(inside) == 6
    assert any("in the update" in error and "before session.step()" in error for error in inside)
    assert any("outside of a turn" in error for error in inside)


# --- scaler, reduce dtype, schedules


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_an_overflow_on_one_replica_lowers_the_scale_on_all_and_a_comer_catches_up_with_it(
    job: Job, bf16: bool
) -> None:
    job.coordinator(replicas=2)
    extra = {"overflow_at": 6, "bf16": bf16}
    start(job, "r0", "r1", loop="scaled", steps=16 if bf16 else 0, step_ms=10, extra=extra)
    if not bf16:
        job.wait_step("r0", 9)
        job.kill("r1")
        restart_and_finish(job, "r1", lambda: start(job, "r1", loop="scaled", steps=0, step_ms=10, extra=extra))
    job.assert_finished("r0", "r1")
    job.assert_identical("r0", "r1")
    verdicts = {line["step"]: line["verdict"] for line in job.lines("r0", "step")}
    assert [step for step, verdict in verdicts.items() if verdict == "skip"] == [6]
    r0 = {line["of"]: (line["scale"], line["rate"]) for line in said(job, "r0")}
    r1 = {line["of"]: (line["scale"], line["rate"]) for line in said(job, "r1") if line["of"] == line["step"] - 1}
    assert all(r0[step] == seen for step, seen in r1.items())
    assert r0[5][0] == 2.0**11, "it grew after four good steps"
    assert r0[6] == (2.0**10, r0[5][1]), "and was halved; the schedule did not move"
    assert r0[10][0] == 2.0**11, "four good steps later it grows again"
    if bf16:
        assert "plan" in (job.path / "r0.log").read_text()


# --- several models, unused parameters, accumulation, learning rates


def test_several_models_and_optimizers_unused_parameters_accumulation_and_rates_by_the_share(job: Job) -> None:
    job.coordinator(replicas=2)
    start(job, "r0", "r1", loop="several", steps=30, step_ms=10)
    job.wait_step("r0", 10)
    job.kill("r1")
    job.assert_finished("r0")
    lines = said(job, "r0")
    for line in lines:
        base = 0.02 * 0.95 ** (line["of"] - 1)
        full, scaled = line["rates"]  # before and after the session's own hook
        assert full == pytest.approx(base)
        assert scaled == pytest.approx(base * line["contributors"] / 2)
    assert {line["contributors"] for line in lines} == {1, 2}
    models = nn.ModuleDict({"trunk": network(), "head": Branches()})
    optimizers = [
        torch.optim.AdamW(models["trunk"].parameters(), lr=0.01),
        torch.optim.SGD(models["head"].parameters(), lr=0.02, momentum=0.5),
    ]
    losses = []
    for step, batches in enumerate(dealt(job, "r0"), start=1):
        chosen = samples(batches)
        output = models["trunk"](INPUTS[chosen]) + models["head"](step, INPUTS[chosen])
        loss = (output - TARGETS[chosen]).square().mean()
        losses.append(float(loss.detach()))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for parameter in models.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(models.parameters(), 5.0)
        for optimizer, rate in zip(optimizers, (0.01, 0.02), strict=True):
            share = len(job.lines("r0", "step")[step - 1]["contributors"]) / 2
            optimizer.param_groups[0]["lr"] = rate * 0.95 ** (step - 1) * share
            optimizer.step()
    seen = [line["loss"] for line in job.lines("r0", "step")]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(losses), rtol=1e-3, atol=1e-4)


def test_a_constant_global_batch_while_replicas_are_missing(job: Job) -> None:
    """64 batches in updates of four: 16 updates, each as one process makes it, whoever is there."""
    job.coordinator(replicas=3)
    options: dict[str, Any] = {"steps": 0, "step_ms": 25, "batch_size": 8, "extra": {"passes": 1}}
    start(job, "r0", "r1", "r2", loop="constant_batch", **options)
    job.wait_step("r0", 6)
    job.kill("r2")
    job.wait_step("r0", 11)
    start(job, "r2", loop="constant_batch", **options)
    job.assert_finished("r0", "r1")
    job.assert_identical("r0", "r1")
    batches = dealt(job, "r0")
    assert sorted(batch for step in batches for batch in step) == list(range(64)), "every batch exactly once"
    updates: list[list[int]] = [[]]
    for step in batches:
        updates[-1] += step
        if len(updates[-1]) == 4:
            updates.append([])
        assert len(updates[-1]) < 4, "no step crosses the end of an update"
    assert updates.pop() == []
    (line,) = said(job, "r0")
    assert len(line["updates"]) == len(updates) == 16
    assert line["rate"] == pytest.approx(0.01 * 0.99**16)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for update in updates:
        optimizer.zero_grad()
        chosen = samples(update, 8)
        loss_of(model, INPUTS[chosen], TARGETS[chosen]).backward()
        optimizer.step()
        scheduler.step()
    close(torch.load(job.path / "r0.pt"), model)


# --- inside of a replica


@functools.cache
def twin(kind: str, steps: int) -> nn.Module:
    """One process with all the data: two replicas, a batch of four each."""
    model: nn.Module = network() if kind == "ddp" else Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        chosen = samples([2 * step, 2 * step + 1])
        loss_of(model, INPUTS[chosen], TARGETS[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 if kind == "ddp" else 0.5)
        optimizer.step()
    return model


def finished(job: Job, *replicas: str) -> None:
    job.assert_finished(*(f"{name}/{rank}" for name in replicas for rank in (0, 1)))


def test_ddp_inside_a_replica_averages_over_its_ranks_and_the_session_over_replicas(job: Job) -> None:
    job.coordinator(replicas=2)
    start(job, "r0", "r1", loop="ddp", ranks=2)
    finished(job, "r0", "r1")
    for rank in (0, 1):
        job.assert_identical(f"r0/{rank}", f"r1/{rank}")
    job.assert_identical("r0/0", "r0/1")
    close(torch.load(job.path / "r0.0.pt"), twin("ddp", 12))


def test_tensor_parallel_replicas_keep_what_is_whole_on_each_rank_the_same_and_clip_it_once(job: Job) -> None:
    job.coordinator(replicas=2)
    start(job, "r0", "r1", loop="tensor_parallel", ranks=2)
    finished(job, "r0", "r1")
    for rank in (0, 1):
        job.assert_identical(f"r0/{rank}", f"r1/{rank}")
    first, second = (torch.load(job.path / f"r0.{rank}.pt") for rank in (0, 1))
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name
    close(first, twin("tp", 12))


@pytest.mark.parametrize("from_group", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_mesh_with_a_replicate_dimension_trains_under_fsdp2_and_survives_a_loss(job: Job, from_group: bool) -> None:
    job.coordinator(replicas=2)
    options: dict[str, Any] = {"ranks": 2, "extra": {"from_group": from_group}}
    steps = 12 if from_group else 0
    start(job, "r0", "r1", loop="hsdp", steps=steps, step_ms=15, **options)
    if not from_group:
        job.wait_step("r0", 6)
        job.kill("r1/1")
        assert job.exit_code("r1/0") == 75, job.logs()
        steps = restart_and_finish(job, "r1", lambda: start(job, "r1", loop="hsdp", steps=0, step_ms=15, **options))
    finished(job, "r0", "r1")
    for rank in (0, 1):
        job.assert_identical(f"r0/{rank}", f"r1/{rank}")
    r0, r1 = ({line["of"]: line["mean"] for line in said(job, f"{name}.0")} for name in ("r0", "r1"))
    assert set(r0) == set(range(1, steps + 1))
    assert all(r0[step] == mean for step, mean in r1.items())
    (errors,) = [line["errors"] for line in said(job, "r0.0") if line["of"] == 2]
    assert all(error.startswith("FtarError: ") for error in errors), errors
    for name, error in zip(
        ("allgather", "allgather", "reduce_scatter", "alltoall", "reduce", "scatter", "gather"), errors, strict=False
    ):
        assert f"FtarError: {name} over the replicate dimension of the mesh is not possible" in error
    losses = [line["loss"] for line in job.lines("r0", "step")]
    assert from_group or sum(losses[-9:]) < sum(losses[:9]), "it learns"


# --- refusals


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("ddp", "DistributedDataParallel over 2 ranks"),
        pytest.param("zero", "ZeroRedundancyOptimizer of torch shards its state", marks=pytest.mark.soak),
    ],
)
def test_what_spans_replicas_is_refused_with_what_to_do_instead(job: Job, what: str, wanted: str) -> None:
    job.coordinator(replicas=2)
    port = claim_port()
    for rank in (0, 1):
        extra = {"rank": rank, "port": port, "what": what}
        start(job, f"r{rank}", loop="wrapped_across", extra=extra)
    for name in ("r0", "r1"):
        assert job.exit_code(name) == 2, job.logs()
        log = (job.path / f"{name}.log").read_text()
        assert wanted in log
        assert "hint: " in log
        assert "Traceback" not in log


def test_one_torchrun_over_several_replicas_is_refused_at_once(job: Job) -> None:
    job.coordinator(replicas=2)
    port = str(claim_port())
    for rank in (0, 1):
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        job.start(f"r{rank}", environment={**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert job.exit_code("r1") == 2, job.logs()
    log = (job.path / "r1.log").read_text()
    assert "rank 0 of this process group is of replica r0, rank 1 of r1" in log
    assert "Traceback" not in log
