"""Replicas that come back, in real jobs: two at once, a source that dies while it gives, and the bits agree."""

from __future__ import annotations

import signal

from .conftest import Job, until

OPTIONS = {"steps": 150, "step_ms": 25.0, "frozen_width": 2_000_000}  # 16 MB of state


def test_two_replicas_come_back_at_once_while_a_source_dies(job: Job) -> None:
    """r0 is killed while it gives pieces of its state to the others, which go on with what r3 holds."""
    job.coordinator(replicas=4, options=("--prepare", "30s"))
    job.start("r1", "r2", "r3", **OPTIONS)
    job.start("r0", environment={"FTAR_BREAKPOINTS": "serve,skip=1,action=kill"}, **OPTIONS)
    job.wait_step("r3", 8)
    job.kill("r1")
    job.kill("r2")
    job.wait_step("r3", max(job.steps("r3")) + 3)
    job.start("r1", "r2", environment={"FTAR_CATCHUP_MBIT": "2000"}, **OPTIONS)
    job.wait_contributes("r1", 2)
    job.wait_contributes("r2", 2)
    assert job.exit_code("r0") == -signal.SIGKILL, "it was killed while it gave"
    job.assert_finished("r1", "r2", "r3")
    job.assert_identical("r1", "r2", "r3")
    assert [line["step"] for line in job.lines("r3", "step")] == list(range(1, 151)), "no step lost, none twice"
    for name in ("r1", "r2"):
        fetches = job.lines(name, "fetch")
        assert fetches, job.logs()
        assert all(sum(line["sources"].values()) == line["bytes"] for line in fetches)
        steps = [line["step"] for line in job.lines(name, "step") if line["replayed"]]
        assert steps == sorted(steps)


def test_a_replay_buffer_that_is_too_small_is_an_event_with_what_to_set(job: Job) -> None:
    """A source that gives slowly and a buffer of a few steps: it begins again, says why, and gets there when it can."""
    job.coordinator(replicas=2)
    slow = {"FTAR_CATCHUP_MBIT": "30"}
    options = {**OPTIONS, "steps": 400, "step_ms": 10.0, "frozen_width": 500_000}
    job.start("r0", "r1", environment=slow, **options)
    job.wait_step("r0", 5)
    job.kill("r1")
    job.start("r1", environment={"FTAR_REPLAY_BUFFER": "5K"}, **options)

    def said() -> bool:
        with job.operator() as operator:
            events = operator.request("events").events
        return any(e.kind == "replica.catchup-restarted" and "FTAR_REPLAY_BUFFER" in e.reason for e in events)

    until(said, job.logs)
    assert job.lines("r1", "catchup-restart")
