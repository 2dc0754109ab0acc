"""A flipped bit in a real job of three: caught then or within one rotation, the replica named, put out, healed."""

from __future__ import annotations

import json

import pytest

from .conftest import Job, until

ROTATION = 4


def events(job: Job, kind: str) -> list[str]:
    lines = (job.path / "store" / "events.jsonl").read_text().splitlines()
    return [event["reason"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("where", "point", "named"),
    [
        ("reduced", "reduced", "reduced gradients, bucket "),
        pytest.param("parameter", "forward", "parameter ", marks=pytest.mark.soak),
        pytest.param("optimizer", "forward", "optimizer state ", marks=pytest.mark.soak),
    ],
)
def test_a_flipped_bit_is_named_and_its_replica_healed(job: Job, where: str, point: str, named: str) -> None:
    job.coordinator(replicas=3, options=("--evict-diverged",))
    rotation = {"FTAR_ROTATION": str(ROTATION)}
    point = f"{point},step=6,action=flip,where={where},seed=3"
    job.start("r0", "r2", steps=40, step_ms=20, environment=rotation)
    job.start("r1", steps=40, step_ms=20, environment={**rotation, "FTAR_BREAKPOINTS": point})
    assert job.exit_code("r1") == 75, job.logs()
    (said,) = events(job, "replica.diverged")
    assert named in said
    step = int(said.partition("at step ")[2].partition(" ")[0])
    assert 6 <= step < 6 + (1 if where == "reduced" else ROTATION), said
    assert "from those of the 2 others" in said
    job.start("r1", steps=40, step_ms=20, environment=rotation)
    until(lambda: events(job, "replica.joined")[3:] or job.exit_code("r0") == 0, job.logs)
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    assert len(events(job, "replica.diverged")) == 1


@pytest.mark.soak
def test_ranks_of_a_replica_are_told_apart(job: Job) -> None:
    """Three replicas of two ranks: the rank, and the tensor of its shard."""
    job.coordinator(replicas=3)
    job.start_team("r0", "r2", steps=15, step_ms=10)
    flip = {"FTAR_BREAKPOINTS": "reduced,step=6,rank=1,action=flip,seed=1"}
    job.start_team("r1", steps=15, step_ms=10, environment=flip)
    job.assert_finished(*(f"r{i}/{rank}" for i in range(3) for rank in range(2)))
    said = events(job, "replica.diverged")[0]
    assert said.startswith("at step 6 its rank 1: reduced gradients, bucket ")
    assert "`ftctl evict replica r1`" in said
