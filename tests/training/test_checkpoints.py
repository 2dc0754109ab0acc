"""The day all replicas die: real processes are killed, and a job goes on from what they had written."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ftar_core
from ftar_core.training.checkpoints.layout import steps_in, survey

from .conftest import Job, until


def checkpoints(job: Job, every: int = 10, **options: object) -> ftar_core.Checkpoint:
    return ftar_core.Checkpoint(job.path / "checkpoints", every=every, **options)  # type: ignore[arg-type]


def written(job: Job) -> list[int]:
    return steps_in(job.path / "checkpoints")


def wait_written(job: Job, step: int) -> None:
    until(lambda: any(found >= step for found in written(job)), job.logs)


def trained(job: Job, names: tuple[str, ...], since: int) -> Counter[int]:
    """How often each batch was trained in the history that counts: steps up to `since` as they were first made, those
    behind it as they were made after the restart."""
    found: dict[int, dict[str, int]] = {}
    for name in names:
        again = [line["mono"] for line in job.lines(name, "restored")]
        for line in job.lines(name, "step"):
            first = not again or line["mono"] < again[-1]
            if not line["replayed"] and (line["step"] <= since) == first:
                found[line["step"]] = line["batches"]
    return Counter(batch for batches in found.values() for batch in batches.values())


def test_all_replicas_die_and_the_job_ends_with_the_bits_of_one_that_ran_through(job: Job, tmp_path: Path) -> None:
    names = ("r0", "r1", "r2")
    job.coordinator(replicas=3)
    job.start(*names, steps=60, step_ms=5, checkpoint=checkpoints(job))
    wait_written(job, 20)
    for name in names:
        job.kill(name)
    found = written(job)[-1]
    job.start(*names, steps=60, step_ms=5, checkpoint=checkpoints(job))
    job.assert_finished(*names)
    end = job.assert_identical(*names)
    assert end["step"] == 60
    assert {line["step"] for name in names for line in job.lines(name, "restored")} == {found}, job.logs()
    assert set(trained(job, names, found).values()) == {1}
    assert len(trained(job, names, found)) == 180
    assert written(job)[-1] == 60, "the job's end is kept, too"
    assert len(written(job)) <= 3

    calm = Job(tmp_path / "calm")
    try:
        calm.coordinator(replicas=3)
        calm.start(*names, steps=60, step_ms=0)
        calm.assert_finished(*names)
        assert calm.assert_identical(*names)["params_digest"] == end["params_digest"]
    finally:
        calm.close()


def manifest(job: Job, step: int) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((job.path / "checkpoints" / f"step-{step:09d}" / "ftar.json").read_text())
    return loaded


MOMENTS = ("checkpoint-copied", "checkpoint-write", "checkpoint-joined", "checkpoint-manifest", "checkpoint-published")


@pytest.mark.parametrize(
    "moment", [m if m == "checkpoint-write" else pytest.param(m, marks=pytest.mark.soak) for m in MOMENTS]
)
def test_a_writer_that_dies_while_it_writes_is_replaced_and_what_it_left_never_loaded(job: Job, moment: str) -> None:
    """r2 has the turn of step 20, r0 that of step 30 (test_checkpoint_files.py)."""
    job.coordinator(replicas=3)
    skip = ",skip=3" if moment == "checkpoint-write" else ""  # some tensors are written, others not
    job.start("r0", "r1", steps=400, step_ms=20, checkpoint=checkpoints(job, at_end=False))
    job.start(
        "r2",
        steps=400,
        step_ms=20,
        checkpoint=checkpoints(job, at_end=False),
        environment={"FTAR_BREAKPOINTS": f"{moment},step=20{skip}"},
    )
    assert job.exit_code("r2") == -9, job.logs()
    wait_written(job, 20)
    assert manifest(job, 20)["replica"] == ("r2" if moment == "checkpoint-published" else "r0")
    wait_written(job, 30)
    until(lambda: not list((job.path / "checkpoints").glob(".step-*20.*")), "the next writer tidies up")
    names = ("r0", "r1")
    for name in names:
        job.kill(name)
    found = written(job)[-1]
    job.start(*names, steps=found + 5, step_ms=5, checkpoint=checkpoints(job))
    job.assert_finished(*names)
    job.assert_identical(*names)
    assert {line["step"] for name in names for line in job.lines(name, "restored")} == {found}


def flipped(name: str, step: int) -> dict[str, str]:
    """A bit of a parameter that the comparison of steps would find in ages; the votes before a checkpoint, at once."""
    flip = f"forward,step={step},action=flip,where=parameter,seed=2"
    return {"FTAR_ROTATION": "100000", **({"FTAR_BREAKPOINTS": flip} if name == "r2" else {})}


def test_a_replica_whose_state_is_not_the_others_writes_no_checkpoint(job: Job) -> None:
    """Nobody has named it yet. r2 has the turn of steps 20, 50, ... where its snapshot is made in time."""
    names = ("r0", "r1", "r2")
    job.coordinator(replicas=3)
    for name in names:
        kept = checkpoints(job, at_end=False, keep=100)
        job.start(name, steps=4000, step_ms=20, checkpoint=kept, environment=flipped(name, 13))
    until(lambda: job.lines("r2", "checkpoint-odd"), job.logs)
    assert "was flipped" in (job.path / "r2.log").read_text()
    odd = job.lines("r2", "checkpoint-odd")[0]["step"]
    until(lambda: odd in written(job), lambda: f"the next in the order writes that of step {odd}\n{job.logs()}")
    writers = {step: manifest(job, step)["replica"] for step in written(job)}
    assert "r2" not in [writer for step, writer in writers.items() if step > 13], writers
    assert "checkpoint.failed" not in (job.path / "coordinator.log").read_text()


def test_two_states_that_differ_are_no_checkpoint(job: Job) -> None:
    job.coordinator(replicas=2)
    for name in ("r0", "r2"):
        kept = checkpoints(job, at_end=False, keep=100)
        job.start(name, steps=400, step_ms=20, checkpoint=kept, environment=flipped(name, 13))
    log = job.path / "coordinator.log"
    until(lambda: "the states of r0, r2 differ, and nobody can say whose is right" in log.read_text(), job.logs)
    before = written(job)
    assert before in ([10], [])
    job.wait_step("r0", max(job.steps("r0")) + 25)
    assert written(job) == before, "training goes on, and what is kept was right"


def test_another_number_of_replicas_goes_on_and_a_damaged_checkpoint_is_passed_by(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=400, step_ms=20, checkpoint=checkpoints(job, keep=100))
    wait_written(job, 30)
    for name in ("r0", "r1"):
        job.kill(name)
    job.kill_coordinator()
    found = written(job)[-1]
    for newest in written(job)[-1:]:
        with (job.path / "checkpoints" / f"step-{newest:09d}" / "__0_0.distcp").open("r+b") as file:
            file.seek(700)
            file.write(b"\xff\xff\xff\xff")
    job.coordinator(replicas=3, options=("--new", "--store", str(job.path / "another")))
    names = ("r0", "r1", "r2")
    job.start(*names, steps=found + 3, step_ms=5, checkpoint=checkpoints(job, at_end=False))
    job.assert_finished(*names)
    job.assert_identical(*names)
    assert {line["step"] for name in names for line in job.lines(name, "restored")} == {found - 10}, job.logs()
    assert "SHA-256" in job.lines("r0", "checkpoint-damaged")[-1]["reason"]
    since = found - 10
    assert set(trained(job, names, since).values()) == {1}
    assert len(trained(job, names, since)) == 2 * since + 3 * 13
    again = survey(job.path / "checkpoints")[-1]
    assert again.loadable
    assert again.history == 2, "the newest is of the history that counts"
    assert again.step in (found, found + 1, found + 2, found + 3), "the damaged one is in nobody's way"


def test_a_disk_that_is_full_costs_the_checkpoint_and_nothing_else(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=45, step_ms=5, width=4000, file_bytes=100_000, checkpoint=checkpoints(job, at_end=False))
    job.assert_finished("r0")
    assert [line["step"] for line in job.lines("r0", "step")] == list(range(1, 46))
    failed = job.lines("r0", "checkpoint-failed")
    assert failed
    assert "large" in failed[0]["reason"]
    assert written(job) == []
    assert not list((job.path / "checkpoints").glob(".step-*"))
    assert "checkpoint.failed" in (job.path / "coordinator.log").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_file_system_without_room_is_said_and_the_next_checkpoint_is_tried(job: Job, small_disk: Path) -> None:
    kept = ftar_core.Checkpoint(small_disk, every=10, at_end=False)
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=100_000, step_ms=10, width=8000, checkpoint=kept)

    def failed() -> list[str]:
        return [line["reason"] for name in ("r0", "r1") for line in job.lines(name, "checkpoint-failed")]

    until(failed, job.logs)
    assert all(reason.endswith(": No space left on device") for reason in failed()), failed()
    assert steps_in(small_disk) == []
    until(lambda: "checkpoint.failed" in (job.path / "coordinator.log").read_text(), job.logs)
    with job.operator() as operator:
        view = operator.request("status").job
    assert view is not None
    assert view.checkpoint.failures > 0
    assert view.checkpoint.failed.endswith(": No space left on device")
    job.wait_step("r0", max(job.steps("r0")) + 10)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    until(lambda: steps_in(small_disk), lambda: f"with room, the next one is written\n{job.logs()}")
    assert "Traceback" not in job.logs()
    for name in ("r0", "r1"):
        job.kill(name)


def test_a_second_job_is_kept_out_of_the_directory(job: Job, tmp_path: Path) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=4000, step_ms=5, checkpoint=checkpoints(job))
    wait_written(job, 10)
    other = Job(tmp_path / "other")
    try:
        other.coordinator(replicas=1)
        other.start("r0", steps=40, step_ms=5, checkpoint=checkpoints(job, restore=True))
        assert other.exit_code("r0") == 77
        assert "is in use by job t (coordinator" in other.logs()
    finally:
        other.close()


def test_by_time_it_is_the_coordinators_clock_that_says_when(job: Job) -> None:
    """So all replicas keep the same step, and each finds that the others have written it."""
    job.coordinator(replicas=2)
    job.start("r0", "r1", steps=4000, step_ms=20, checkpoint=checkpoints(job, every="0.3s", at_end=False))

    def steps() -> list[int]:
        return [line["step"] for name in ("r0", "r1") for line in job.lines(name, "checkpoint")]

    until(lambda: len(set(steps())) >= 3, job.logs)
    assert len(set(steps())) == len(steps()), "no checkpoint is written twice"
    assert not [line for name in ("r0", "r1") for line in job.lines(name, "checkpoint-failed")], job.logs()


def test_a_directory_that_is_none_is_refused_before_anything_is_trained(job: Job) -> None:
    (job.path / "file").write_text("")
    job.coordinator(replicas=1)
    job.start("r0", steps=12, checkpoint=ftar_core.Checkpoint(job.path / "file" / "checkpoints", every=10))
    assert job.exit_code("r0") == 77, job.logs()
    assert "Not a directory" in (job.path / "r0.log").read_text()
    assert "Traceback" not in job.logs()
    assert job.steps("r0") == []


def test_another_model_is_refused_by_name(job: Job) -> None:
    job.coordinator(replicas=1)
    job.start("r0", steps=12, step_ms=5, checkpoint=checkpoints(job))
    job.assert_finished("r0")
    job.coordinator(replicas=1, options=("--new", "--store", str(job.path / "another")))
    job.start("r0", steps=40, width=25, checkpoint=checkpoints(job))
    assert job.exit_code("r0") == 77
    assert written(job)[-1] == 12  # that of step 10 is given up where the machine is slow
    assert "tensor model.0.weight: torch.float32 (25, 8) here, torch.float32 (24, 8) in the checkpoint" in job.logs()


def test_ranks_write_their_shards_and_another_number_of_ranks_loads_them(job: Job) -> None:
    """Shards of different sizes, one of them empty."""
    job.coordinator(replicas=1)
    job.start_team("r0", ranks=2, steps=12, checkpoint=checkpoints(job))
    job.assert_finished("r0/0", "r0/1")
    assert written(job)[-1] == 12  # that of step 10 is given up where the machine is slow
    path = job.path / "checkpoints" / "step-000000012"
    assert {p.name for p in path.iterdir()} >= {"__0_0.distcp", "__1_0.distcp", ".metadata", "ftar.json"}
    whole = torch.load(job.path / "r0.0.pt")
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole.items()}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in whole.items())

    job.coordinator(replicas=1, options=("--new", "--store", str(job.path / "another")))
    job.start_team("r0", ranks=1, steps=14, checkpoint=checkpoints(job))
    job.assert_finished("r0/0")
    assert [line["step"] for line in job.lines("r0", "restored")] == [12], job.logs()
    assert [line["step"] for line in job.lines("r0", "step")][-2:] == [13, 14]
