"""Jobs of two or three replicas, end to end: what must survive does, and the bits agree."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from pathlib import Path

import torch

from ftar_core.training.sampling import batch_indices
from ftar_core.wire.agentlink import FromRank, RankRegister, RankReport, from_rank
from ftar_core.wire.codec import FrameParser

from .conftest import Job, until
from .trainer import SAMPLES, data, model_of


def twin(
    steps: list[list[int]], *, width: int, batch_size: int, momentum: float
) -> tuple[list[float], torch.nn.Module]:
    """The same training in one process, the gradient being the plain average over the dealt batches."""
    inputs, targets = data()
    model = model_of(width, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    losses = []
    for batches in steps:
        total = torch.zeros(())
        optimizer.zero_grad()
        for batch in batches:
            indices = torch.tensor(batch_indices(batch, batch_size, SAMPLES, 5))
            total = total + (model(inputs[indices]) - targets[indices]).square().mean()
        (total / len(batches)).backward()
        optimizer.step()
        losses.append(float(total.detach()) / len(batches))
    return losses, model


def test_one_replica_alone_trains_and_ends(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=12)
    job.assert_finished("r0")
    assert job.coordinator_exit() == 0
    assert job.steps("r0") == list(range(1, 13))
    losses, _ = twin([[b] for b in range(12)], width=24, batch_size=4, momentum=0.9)
    seen = [line["loss"] for line in job.lines("r0", "step")]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(losses), rtol=1e-4, atol=1e-5)


def test_three_replicas_train_as_one_process_with_three_batches_would(job: Job) -> None:
    job.coordinator(replicas=3)
    job.start("r0", "r1", "r2", steps=40, step_ms=2)
    job.assert_finished("r0", "r1", "r2")
    end = job.assert_identical("r0", "r1", "r2")
    assert end["step"] == 40
    losses, _ = twin([[3 * s, 3 * s + 1, 3 * s + 2] for s in range(40)], width=24, batch_size=4, momentum=0.9)
    for name in ("r0", "r1", "r2"):
        lines = job.lines(name, "step")
        assert [line["step"] for line in lines] == list(range(1, 41))
        assert all(line["contributors"] == ["r0", "r1", "r2"] for line in lines)
        assert all(line["tokens"] == 12 for line in lines)
        seen = torch.tensor([line["loss"] for line in lines])
        torch.testing.assert_close(seen, torch.tensor(losses), rtol=1e-3, atol=1e-4)
    assert sum(losses[-10:]) < sum(losses[:10]), "it learns"


def test_a_killed_replica_costs_no_step_and_comes_back(job: Job) -> None:
    job.coordinator(replicas=3)
    job.start("r0", "r1", "r2", steps=0, step_ms=15)
    job.wait_step("r0", 10)
    job.kill("r1")
    job.wait_step("r0", max(job.steps("r0")) + 5)
    job.start("r1", steps=0, step_ms=15)
    job.wait_contributes("r1", 2)
    last = job.finish("r0", "r1", "r2")
    for survivor in ("r0", "r2"):
        lines = job.lines(survivor, "step")
        assert [line["step"] for line in lines] == list(range(1, last + 1)), "no step lost, none twice"
        without = [line for line in lines if line["contributors"] == ["r0", "r2"]]
        assert without
        assert sum(line["retries"] for line in lines) <= 1
        produced = [line["t_produced"] for line in lines]
        assert produced == sorted(produced)
    replayed = [line["step"] for line in job.lines("r1", "step") if line["replayed"]]
    assert replayed, "the steps that went on meanwhile were replayed"
    assert replayed == list(range(replayed[0], replayed[0] + len(replayed)))


def test_the_step_in_which_a_replica_dies_is_reduced_again_not_recomputed(job: Job) -> None:
    """r1 is slow: the others have produced everything and wait in the ring when it dies."""
    job.coordinator(replicas=3)
    job.start("r0", "r2", steps=60, step_ms=5)
    job.start("r1", steps=60, step_ms=150)
    job.wait_step("r0", 5)
    job.kill("r1")
    job.assert_finished("r0", "r2")
    job.assert_identical("r0", "r2")
    lines = job.lines("r0", "step")
    retried = [line for line in lines if line["retries"]]
    assert len(retried) == 1, job.logs()
    (line,) = retried
    assert line["contributors"] == ["r0", "r2"]
    epochs = [e for e in job.lines("r0", "epoch") if e["retry"] and e["step"] == line["step"]]
    assert len(epochs) == 1
    assert line["t_produced"] < epochs[0]["mono"] < line["t_commit"], "gradients from before the death were used"


def test_every_batch_is_trained_exactly_once_although_replicas_die(job: Job) -> None:
    """The mean losses of the whole history equal those of a twin that is told who contributed, so no batch was lost."""
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=40, step_ms=10)
    job.wait_step("r0", 10)
    job.kill("r1")
    job.assert_finished("r0")
    lines = job.lines("r0", "step")
    dealt: list[list[int]] = []
    waiting: list[int] = []
    cursor = 0
    previous = ["r0", "r1"]
    for line in lines:
        batches: dict[str, int] = {}
        for name in previous:
            if waiting:
                batches[name] = waiting.pop(0)
            else:
                batches[name] = cursor
                cursor += 1
        waiting += [batch for name, batch in batches.items() if name not in line["contributors"]]
        dealt.append([batch for name, batch in batches.items() if name in line["contributors"]])
        previous = line["contributors"]
    losses, _ = twin(dealt, width=24, batch_size=4, momentum=0.9)
    seen = torch.tensor([line["loss"] for line in lines])
    torch.testing.assert_close(seen, torch.tensor(losses), rtol=1e-3, atol=1e-4)
    trained = [batch for batches in dealt for batch in batches]
    assert sorted(trained) == list(range(len(trained)))


def test_a_drained_replica_leaves_at_a_boundary_with_its_own_exit_code(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=120, step_ms=10)
    job.wait_step("r0", 10)
    with job.operator() as operator:
        assert operator.request("drain", replica="r1", reason="test").code == "ok"
    assert job.exit_code("r1") == 76, job.logs()
    job.assert_finished("r0")
    drained = job.lines("r1", "end")[-1]
    assert drained["step"] == job.steps("r1")[-1]
    assert all(line["retries"] == 0 for line in job.lines("r0", "step")), "no step is repeated for a drain"


def test_a_restarted_coordinator_costs_a_pause_and_nothing_else(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=0, step_ms=10)
    job.wait_step("r0", 15)
    job.kill_coordinator()
    job.restart_coordinator()
    last = job.finish("r0", "r1")
    assert job.steps("r0") == list(range(1, last + 1))


def test_a_job_below_its_minimum_holds_and_a_comer_gets_the_state_from_the_waiting_one(job: Job) -> None:
    job.coordinator(replicas=2, min_replicas=2)
    job.start("r0", "r1", steps=40, step_ms=10)
    job.wait_step("r0", 10)
    job.kill("r1")
    job.start("r1", steps=40, step_ms=10)
    job.wait_contributes("r1", 2)
    job.assert_finished("r0", "r1")
    job.assert_identical("r0", "r1")
    assert all(len(line["contributors"]) == 2 for line in job.lines("r0", "step")[12:])


def test_gradients_that_are_not_finite_somewhere_are_skipped_by_everybody(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", steps=20, step_ms=2)
    job.start("r1", steps=20, step_ms=2, odd_sample_nan_at=7)
    job.assert_finished("r0", "r1")
    job.assert_identical("r0", "r1")
    for name in ("r0", "r1"):
        verdicts = {line["step"]: line["verdict"] for line in job.lines(name, "step")}
        assert [step for step, verdict in verdicts.items() if verdict == "skip"] == [7]


def test_an_exception_in_the_update_ends_that_replica_and_only_that(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", steps=30, step_ms=5)
    job.start("r1", steps=30, step_ms=5, fail_update_at=8)
    assert job.exit_code("r1") == 1
    assert "RuntimeError: on purpose" in (job.path / "r1.log").read_text()
    job.assert_finished("r0")
    assert job.steps("r0") == list(range(1, 31))
    with_r1 = [line["step"] for line in job.lines("r0", "step") if "r1" in line["contributors"]]
    assert max(with_r1) == 8, "its step was committed before the update; it cannot contribute another"


def test_another_model_is_refused_at_the_door_with_its_name(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", steps=0, step_ms=5)
    job.start("r1", steps=0, step_ms=5)
    job.wait_step("r0", 3)
    job.kill("r1")
    job.start("r1", steps=0, width=25)
    assert job.exit_code("r1") == 77, job.logs()
    log = (job.path / "r1.log").read_text()
    assert "the model of r1 is not the job's: parameter 2.weight has shape (1, 25), on r0 (1, 24)" in log
    assert "start it with the same script" in log
    assert "Traceback" not in log


def test_a_state_that_is_not_this_model_s_is_refused_with_the_tensor_s_name(job: Job) -> None:
    """The bucket plans agree: the difference is in a part of the model that is not trained."""
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=0, step_ms=5, frozen_width=3)
    job.wait_step("r0", 3)
    job.kill("r1")
    job.start("r1", steps=0, step_ms=5, frozen_width=4)
    assert job.exit_code("r1") == 77, job.logs()
    log = (job.path / "r1.log").read_text()
    assert "tensor 3.frozen.weight: torch.float32 (4, 1) here, torch.float32 (3, 1) in the fetched state" in log
    assert "Traceback" not in log
    job.wait_step("r0", max(job.steps("r0")) + 3)


def test_a_source_that_dies_while_followed_does_not_stop_the_shadow(job: Job) -> None:
    """r3 catches up and follows; whichever replica it follows is killed as soon as it has its state."""
    job.coordinator(replicas=3, options=("--prepare", "1s"))
    job.start("r0", "r1", "r2", steps=200, step_ms=15)
    job.wait_step("r0", 10)
    job.kill("r2")
    job.start("r2", steps=200, step_ms=15)
    until(lambda: "state after step" in (job.path / "r2.log").read_text(), job.logs)
    source = (job.path / "r2.log").read_text().rsplit("state after step", 1)[1].split(" from ")[1].split(":")[0]
    job.kill(source)
    job.wait_step(next(name for name in ("r0", "r1") if name != source), 60)
    if job.replicas["r2"].exitcode == 75:  # it had joined already and its stream was gone: its supervisor starts it
        job.start("r2", steps=200, step_ms=15)
    job.start(source, steps=200, step_ms=15)
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")


def test_a_replica_that_was_paused_and_evicted_comes_back_as_the_same_process_and_disturbs_nobody(job: Job) -> None:
    job.coordinator(replicas=3, options=("--suspect-after", "2s", "--evict-after", "4s"))
    job.start("r0", "r1", "r2", steps=300, step_ms=10)
    job.wait_step("r0", 10)
    pid = job.replicas["r1"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    until(lambda: job.lines("r0", "step")[-1]["contributors"] == ["r0", "r2"], job.logs)
    job.wait_step("r0", max(job.steps("r0")) + 5)
    os.kill(pid, signal.SIGCONT)
    job.wait_contributes("r1", 2)
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    assert len(job.lines("r1", "out")) == 1
    for name in ("r0", "r2"):
        assert job.steps(name) == list(range(1, 301)), "no step lost, none twice"
        assert sum(line["retries"] for line in job.lines(name, "step")) == 1


def test_a_loop_that_is_left_early_leaves_the_job(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", steps=30, step_ms=5)
    job.start("r1", steps=30, step_ms=5, stop_loop_at=10)
    assert job.exit_code("r1") == 0
    assert "the training loop was left before the job's last step" in (job.path / "r1.log").read_text()
    job.assert_finished("r0")
    assert job.steps("r0") == list(range(1, 31))


def test_a_buffer_that_forward_changes_is_refused_at_the_first_step(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=5, counts_calls=True)
    assert job.exit_code("r0") == 2
    assert "buffer 3.calls was changed in forward" in (job.path / "r0.log").read_text()


def test_without_a_coordinator_a_replica_waits_for_its_time_and_says_so(job: Job) -> None:
    job.coordinator(replicas=1, options=("--member-wait", "1s"))
    job.start("r0", steps=0, step_ms=5)
    job.wait_step("r0", 3)
    job.kill_coordinator()
    assert job.exit_code("r0") == 75, job.logs()
    assert "no coordinator" in (job.path / "r0.log").read_text()


def test_a_missing_setting_is_one_line_and_exit_code_2(job: Job) -> None:
    job.start("r0", environment={"FTAR_COORDINATOR": ""})
    assert job.exit_code("r0") == 2
    log = (job.path / "r0.log").read_text()
    assert "FTAR_COORDINATOR is not set" in log
    assert "Traceback" not in log


def test_a_full_journal_disk_stops_nothing(job: Job) -> None:
    job.coordinator(replicas=1)
    path = job.journals / "r0.jsonl"
    path.symlink_to("/dev/full")
    job.start("r0", steps=5)
    assert job.exit_code("r0") == 0
    log = (job.path / "r0.log").read_text()
    assert log.count("cannot be written") == 1


def test_the_node_s_agent_hears_where_the_replica_stands_and_how_its_links_are(job: Job) -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as agent:
        path = f"{short}/ranks.sock"
        agent.bind(path)
        agent.listen()
        agent.settimeout(90)
        job.coordinator(replicas=2)
        job.start("r0", steps=40, step_ms=10, environment={"FTAR_AGENT": path})
        job.start("r1", steps=40, step_ms=10)
        rank, _ = agent.accept()
        with rank:
            rank.settimeout(90)
            parser = FrameParser(from_rank)
            messages: list[FromRank] = []
            while data := rank.recv(65536):
                messages += parser.feed(data)
    job.assert_finished("r0", "r1")
    register, *reports = messages
    assert isinstance(register, RankRegister)
    assert (register.job, register.replica, register.rails) == ("t", "r0", ("a", "b"))
    training = [r for r in reports if isinstance(r, RankReport) and r.state == "contributing" and r.links]
    assert training
    last = training[-1]
    assert last.contributors == ("r0", "r1")
    assert last.step > 10
    assert {(link.peer, link.rail) for link in last.links} == {("r1", "a"), ("r1", "b")}
    assert [link.state for link in last.links if link.active] == ["UP", "UP"]  # one to r1, one from it


def test_the_journal_says_what_a_report_needs(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=30, step_ms=1)
    job.assert_finished("r0")
    (start,) = job.lines("r0", "start")
    (end,) = job.lines("r0", "end")
    step = job.lines("r0", "step")[-1]
    assert start["incarnation"] == step["incarnation"] == end["incarnation"]
    assert end["exit_code"] == 0
    assert len(end["params_digest"]) == len(end["optimizer_digest"]) == 64
    assert step["t_begin"] <= step["t_produced"] <= step["t_reduced"] <= step["t_commit"] <= step["t_updated"]
    assert step["stall_ms"] is not None
    assert step["tokens_per_s"] > 0
    text = Path(job.journals / "r0.jsonl").read_text()
    assert all(json.loads(line) for line in text.splitlines())
    until(lambda: job.replicas["r0"].exitcode == 0, "the process has ended")
