"""The day all replicas die: real processes are killed, and a job goes on from what they had written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import ftar_core
from ftar_core.training.checkpoints.layout import steps_in

from .conftest import Job, until


def checkpoints(job: Job, every: int = 10, **options: object) -> ftar_core.Checkpoint:
    return ftar_core.Checkpoint(job.path / "checkpoints", every=every, **options)  # type: ignore[arg-type]


def written(job: Job) -> list[int]:
    return steps_in(job.path / "checkpoints")


def wait_written(job: Job, step: int) -> None:
    until(lambda: any(found >= step for found in written(job)), job.logs)


def trained(job: Job, names: tuple[str, ...], since: int) -> Counter[int]:
    """How often each batch was trained in the history that counts: the steps up to `since` as they were first made, those
    behind it as they were made after the restart."""
    found: dict[int, dict[str, int]] = {}
    for name in names:
        lines = [line for line in job.lines(name, "step") if not line["replayed"]]
        restarts = [n for n, line in enumerate(job.lines(name)) if line["kind"] == "restored"]
        last = job.lines(name)[restarts[-1]]["mono"] if restarts else float("inf")
        for line in lines:
            if line["step"] <= since if line["mono"] < last else line["step"] > since:
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
