"""Random bits flipped in a real job of three, and calm steps of it: which are caught, and is anything else?

Each replica writes the digest of its whole state behind every step, so the truth is known without asking what is
tested: a flip that is not caught must have left no trace (the lowest bit of a momentum can be rounded away before its
turn to be compared comes), and states that are equal must never be called different."""

from __future__ import annotations

import json
import os
import random
import re
from itertools import count
from pathlib import Path

import pytest

from .conftest import Job, until

FLIPS, CALM = int(os.environ.get("FLIPS", "100")), int(os.environ.get("CALM", "10000"))
SEED = int(os.environ.get("FLIPS_SEED", "1"))
ROTATION = 64
POINTS = {"reduced": "reduced", "parameter": "forward", "optimizer": "forward"}
FLIPPED = re.compile(r"breakpoint \S+ at step (\d+): (bit \d of byte \d+ of .*) was flipped")
NAMES = ("r0", "r1", "r2")


def events(job: Job, *kinds: str) -> list[dict[str, str]]:
    lines = (job.path / "store" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def alarms(job: Job) -> list[tuple[str, str]]:
    return [(event["object"], event["reason"]) for event in events(job, "replica.diverged", "job.diverged")]


class Truth:
    """The states that replicas have written down, read on from where the last look ended."""

    def __init__(self, job: Job) -> None:
        self.files = {name: job.path / f"{name}.states" for name in NAMES}
        self._read = dict.fromkeys(NAMES, 0)
        self.at: dict[str, dict[int, str]] = {name: {} for name in NAMES}

    def look(self) -> None:
        for name, path in self.files.items():
            if path.exists():
                with path.open() as file:
                    file.seek(self._read[name])
                    text = file.read()
                whole = text[: text.rfind("\n") + 1]
                self._read[name] += len(whole)
                for line in whole.splitlines():
                    step, _, digest = line.partition(" ")
                    self.at[name][int(step)] = digest

    def step(self, name: str) -> int:
        self.look()
        return max(self.at[name], default=0)

    def equal(self, step: int) -> bool:
        return len({self.at[name][step] for name in NAMES if step in self.at[name]}) == 1


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_flip_that_leaves_a_trace_is_caught_and_calm_steps_raise_no_alarm(job: Job) -> None:
    rng, truth = random.Random(SEED), Truth(job)
    job.coordinator(replicas=3, options=("--evict-diverged",))

    def start(*names: str, breakpoints: str = "") -> None:
        environment = {"FTAR_ROTATION": str(ROTATION), **({"FTAR_BREAKPOINTS": breakpoints} if breakpoints else {})}
        for name in names:
            job.start(
                name, steps=10_000_000, step_ms=0, max_norm=1.0, states=truth.files[name], environment=environment
            )

    start(*NAMES)
    until_far(truth, "r0", CALM, job)
    calm = truth.step("r0")
    until_far(truth, "r1", calm, job)
    until_far(truth, "r2", calm, job)
    assert all(truth.equal(step) for step in range(1, calm + 1))
    assert len({truth.at["r0"][step] for step in range(1, calm + 1)}) > calm * 0.9, "it trains"
    assert alarms(job) == [], "an alarm, and all states are equal"

    caught: dict[str, int] = dict.fromkeys(POINTS, 0)
    gone: list[str] = []
    for number in count():
        if sum(caught.values()) == FLIPS:
            break
        where = rng.choice(list(POINTS))
        skip, seed = rng.randrange(3, 9), rng.randrange(10_000)
        if job.replicas["r1"].is_alive():
            job.kill("r1")
        log = (job.path / "r1.log").stat().st_size
        known = len(alarms(job))
        start("r1", breakpoints=f"{POINTS[where]},skip={skip},action=flip,where={where},seed={seed}")
        until(lambda at=log: flipped(job.path / "r1.log", at), job.logs)  # type: ignore[misc]
        found = flipped(job.path / "r1.log", log)
        assert found is not None
        step, what = found
        limit = step + (1 if where == "reduced" else ROTATION)
        while not (len(alarms(job)) > known or truth.step("r1") > limit + 2):
            until_far(truth, "r0", truth.step("r0") + 1, job)
        said = alarms(job)[known:]
        if not said:
            last = truth.step("r1")
            until_far(truth, "r0", last, job)
            assert truth.equal(last), f"flip {number}: {what} at step {step} was not caught, and is still there"
            assert where != "reduced", "the digest of a reduced copy is of all its bytes, at that very step"
            gone.append(what)
            continue
        (((name, reason)),) = said
        assert name == "r1", reason
        at = int(reason.partition("at step ")[2].partition(" ")[0])
        assert step <= at < limit, f"{what} at step {step}: {reason}"
        assert job.exit_code("r1") == 75
        caught[where] += 1
    if job.replicas["r1"].is_alive():
        job.kill("r1")
    start("r1")
    end = truth.step("r0") + 3 * ROTATION
    until_far(truth, "r0", end, job)
    until_far(truth, "r1", end, job)
    truth.look()
    assert truth.equal(end)
    assert len(alarms(job)) == sum(caught.values())
    print(
        f"\n{calm} calm steps of 3 replicas: 0 alarms. {FLIPS} flips that left a trace (seed {SEED}): {FLIPS} caught "
        f"({', '.join(f'{n} {where}' for where, n in caught.items())}). {len(gone)} more were rounded away within one "
        f"rotation, 0 missed. {truth.step('r0')} steps in all"
    )
    for what in gone:
        print(f"  no trace of {what}")


def until_far(truth: Truth, name: str, step: int, job: Job) -> None:
    """As long as it gets on."""
    while truth.step(name) < step:
        before = truth.step(name)
        until(lambda: truth.step(name) > before, job.logs)  # noqa: B023


def flipped(log: Path, since: int) -> tuple[int, str] | None:
    with log.open(errors="replace") as file:
        file.seek(since)
        found = FLIPPED.search(file.read())
    return (int(found[1]), found[2]) if found else None
