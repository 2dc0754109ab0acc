"""Gradients that are not finite on one replica: what all do about it is one decision, skip or fail."""

from __future__ import annotations

from ftar_core.wire.exits import RankExit

from .conftest import Job, Line, until

RANKS = ("0", "1")


def events(job: Job, kind: str) -> list[str]:
    path = job.path / "store" / "events.jsonl"
    return [line for line in path.read_text().splitlines() if f'"{kind}"' in line]


def ends(job: Job, *names: str) -> list[Line]:
    until(lambda: all(job.lines(name, "end") for name in names), job.logs)
    return [job.lines(name, "end")[-1] for name in names]


def test_with_fail_the_job_ends_everywhere_with_the_state_before_that_step(job: Job) -> None:
    job.coordinator(replicas=2, options=("--nonfinite", "fail"))
    job.start("r0", steps=20, step_ms=2)
    job.start("r1", steps=20, step_ms=2, odd_sample_nan_at=7)
    seen = ends(job, "r0", "r1")
    assert job.coordinator_exit() == 1
    assert [end["step"] for end in seen] == [6, 6]
    assert [end["exit_code"] for end in seen] == [RankExit.FAILED] * 2
    assert len({(end["params_digest"], end["optimizer_digest"]) for end in seen}) == 1
    for name in ("r0", "r1"):
        assert job.exit_code(name) == 2, "the script has caught NonFiniteGradients"
        assert "error: the gradients of step 7 were not finite" in (job.path / f"{name}.log").read_text()
    (failed,) = events(job, "job.failed")
    assert "step 7: the gradients of r1 were not finite" in failed
    assert not events(job, "job.finished")


def test_ranks_of_sharded_replicas_skip_together(job: Job) -> None:
    job.coordinator(replicas=2)
    job.start_team("r0", steps=15, step_ms=2)
    job.start_team("r1", steps=15, step_ms=2, nan_at=7)
    job.assert_finished(*(f"{name}/{rank}" for name in ("r0", "r1") for rank in RANKS))
    for rank in RANKS:
        job.assert_identical(f"r0/{rank}", f"r1/{rank}")
        for name in ("r0", "r1"):
            verdicts = {line["step"]: line["verdict"] for line in job.lines(f"{name}/{rank}", "step")}
            assert [step for step, verdict in verdicts.items() if verdict == "skip"] == [7]
    (skipped,) = events(job, "step.skipped")
    assert "the gradients of r1 were not finite: nobody updates" in skipped


def test_ranks_of_sharded_replicas_fail_together(job: Job) -> None:
    job.coordinator(replicas=2, options=("--nonfinite", "fail"))
    job.start_team("r0", steps=15, step_ms=2)
    job.start_team("r1", steps=15, step_ms=2, nan_at=7)
    seen = ends(job, *(f"{name}/{rank}" for name in ("r0", "r1") for rank in RANKS))
    assert job.coordinator_exit() == 1
    assert {(end["step"], end["exit_code"]) for end in seen} == {(6, RankExit.FAILED)}
    by_rank = [{end["params_digest"] for end in seen[rank::2]} for rank in range(2)]
    assert [len(digests) for digests in by_rank] == [1, 1]
