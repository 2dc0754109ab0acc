"""Jobs that read through a loader: what was trained, counted sample by sample from what the replicas wrote down."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from . import conftest
from .conftest import Job
from .data_trainer import DataRecipe, run, source_of


class DataJob:
    def __init__(self, job: Job, **options: Any) -> None:
        self.job, self.options = job, options
        self.slow = job.path / "slow"
        self.slow.touch()

    def recipe(self, name: str, **more: Any) -> DataRecipe:
        return DataRecipe(
            environment=self.job.environment(name),
            log=self.job.path / f"{name}.log",
            turns=self.job.path / f"{name}.turns",
            slow=self.slow,
            **{**self.options, **more},
        )

    def start(self, *names: str, **more: Any) -> None:
        for name in names:
            process = conftest.FORKS.Process(target=run, args=(self.recipe(name, **more),), name=name)
            process.start()
            self.job.adopt(name, process)

    def turns(self, name: str) -> dict[int, list[int]]:
        """The samples of the last turn of each step. (A step is begun anew by a replica that started again.)"""
        found: dict[int, list[int]] = {}
        for line in (self.job.path / f"{name}.turns").read_text().splitlines():
            step, indices = json.loads(line)
            found[step] = indices
        return found

    def committed(self, *names: str) -> dict[int, dict[str, int]]:
        """Which batch each contributor trained at each step, as all journals say alike."""
        found: dict[int, dict[str, int]] = {}
        for name in names:
            for line in self.job.lines(name, "step"):
                if not line["replayed"]:
                    assert found.setdefault(line["step"], line["batches"]) == line["batches"], line
                    assert set(line["batches"]) <= set(line["contributors"])
        assert sorted(found) == list(range(1, len(found) + 1)), "every step is in somebody's journal"
        return found

    def samples(self, *names: str) -> Counter[int]:
        """What was trained in the committed history, from what the loops really got."""
        whole: Counter[int] = Counter()
        turns = {name: self.turns(name) for name in names}
        for step, batches in self.committed(*names).items():
            for name, batch in batches.items():
                got = turns[name][step]
                if not self.options.get("stream"):
                    assert got == source_of(self.recipe(name)).indices(batch), (step, name, batch)
                whole.update(got)
        return whole


def storm(data: DataJob, seed: int, blows: int) -> None:
    """Kills and drains, one replica after the other; what is out comes back. The coordinator is not spared."""
    rng, job = random.Random(seed), data.job
    names = ("r0", "r1", "r2")
    lives = dict.fromkeys(names, 1)
    job.wait_step("r0", 5)
    for blow in range(blows):
        if blow % 4 == 3:
            job.kill_coordinator()
            job.restart_coordinator()
            continue
        name = rng.choice(names)
        witness = next(other for other in names if other != name)
        job.wait_contributes(witness, lives[witness])  # somebody must be left
        if blow % 4 == 2:
            job.wait_contributes(name, lives[name])
            with job.operator() as operator:
                assert operator.request("drain", replica=name, reason="test").code == "ok"
                assert job.exit_code(name) == 76, job.logs()
                assert operator.request("rejoin", replica=name).code == "ok"
        else:
            job.kill(name)
        at = max(job.steps(witness))
        if rng.random() < 0.5:
            job.wait_step(witness, at + rng.randrange(1, 4))
        lives[name] = len(job.lines(name, "start")) + 1  # (a process that is killed early has no line)
        data.start(name)
        if rng.random() < 0.6:
            job.wait_contributes(name, lives[name])
    for name in names:
        job.wait_contributes(name, lives[name])


def test_every_sample_is_trained_exactly_once_in_a_storm_of_kills_and_drains(job: Job) -> None:
    data = DataJob(job, samples=3600, batch_size=6)
    job.coordinator(replicas=3)
    data.start("r0", "r1", "r2")
    storm(data, seed=1, blows=4)
    data.slow.unlink()
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    assert data.samples("r0", "r1", "r2") == dict.fromkeys(range(3600), 1)
    began = job.lines("r0", "data")[0]
    assert (began["data"], began["samples"], began["batch_size"], began["total"]) == ("samples", 3600, 6, 600)
    assert "all 600 batches of the data are trained" in (job.path / "coordinator.log").read_text()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stream", [False, True])
def test_every_sample_is_trained_exactly_once_in_a_long_storm(job: Job, seed: int, stream: bool) -> None:
    data = DataJob(job, samples=30_000, batch_size=6, stream=stream)
    job.coordinator(replicas=3)
    data.start("r0", "r1", "r2")
    storm(data, seed=seed, blows=20)
    data.slow.unlink()
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    assert data.samples("r0", "r1", "r2") == dict.fromkeys(range(30_000), 1)


def test_a_stream_is_trained_once_although_a_replica_dies(job: Job) -> None:
    data = DataJob(job, samples=800, batch_size=4, stream=True, workers=1, step_ms=10.0)
    job.coordinator(replicas=2)
    data.start("r0", "r1")
    job.wait_step("r0", 10)
    job.kill("r1")
    data.slow.unlink()
    job.assert_finished("r0")
    lost = next(line for line in (job.path / "coordinator.log").read_text().splitlines() if "replica.lost" in line)
    assert "closed" in lost, "its death was seen at once, although its worker was still there"
    assert data.samples("r0", "r1") == dict.fromkeys(range(800), 1)


def test_a_later_job_goes_on_from_a_checkpoint_with_another_number_of_replicas(job: Job) -> None:
    data = DataJob(job, samples=400, batch_size=4, workers=0, step_ms=1.0, checkpoint=job.path / "checkpoint.pt")
    data.slow.unlink()
    job.coordinator(replicas=2)
    data.start("r0", "r1", steps=20)
    job.assert_finished("r0", "r1")
    first = data.samples("r0", "r1")
    assert sum(first.values()) == 20 * 2 * 4
    for name in ("r0", "r1"):
        (job.journals / f"{name}.jsonl").unlink()
        (job.path / f"{name}.turns").unlink()
    assert job.coordinator_exit() == 0
    job.coordinator(replicas=3, options=("--new", "--store", str(job.path / "second")))
    data.start("r0", "r1", "r2")
    job.assert_finished("r0", "r1", "r2")
    assert first + data.samples("r0", "r1", "r2") == dict.fromkeys(range(400), 1)


def test_a_replica_with_other_data_is_refused_with_one_line(job: Job) -> None:
    data = DataJob(job, samples=100_000, workers=0)
    job.coordinator(replicas=2)
    data.start("r0")
    data.start("r1", seed=4)
    assert job.exit_code("r1") == 77, job.logs()
    log = (job.path / "r1.log").read_text()
    assert "the data here has seed=4, its state seed=3" in log
    assert "Traceback" not in log
    data.start("r1", passes=2)
    assert job.exit_code("r1") == 77, job.logs()
    log = (job.path / "r1.log").read_text()
    assert "the job trains 25000 batches of the data, r1 50000 batches (start it with the same data, batch" in log
    assert "Traceback" not in log
    data.slow.unlink()


def test_a_stream_that_ends_before_its_time_is_one_line_everywhere(job: Job) -> None:
    data = DataJob(job, samples=40, batch_size=4, stream=True, promised=20, workers=1)
    data.slow.unlink()
    job.coordinator(replicas=1)
    data.start("r0")
    assert job.exit_code("r0") == 2, job.logs()
    assert job.steps("r0") == list(range(1, 11))
    log = (job.path / "r0.log").read_text()
    assert "error: the stream ended after 10 items, item 10 is needed\nhint: say how many batches it has" in log
    assert "Traceback" not in log
    assert "its data: the stream ended after 10 items" in (job.path / "coordinator.log").read_text()
