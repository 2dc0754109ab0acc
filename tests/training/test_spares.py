"""Hot spares with real processes: contributors do not become fewer, and after a drain not a bit is different."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftar_core.wire.messages import JobView

from .conftest import Job, until

RANKS = ("0", "1")


def view(job: Job) -> JobView:
    with job.operator() as operator:
        seen = operator.request("status").job
    assert seen is not None
    return seen


def await_state(job: Job, replica: str, state: str) -> None:
    until(
        lambda: any((r.name, r.state) == (replica, state) for r in view(job).replicas),
        lambda: f"{replica} is {state}\n{job.logs()}",
    )


def drain(job: Job, replica: str) -> str:
    with job.operator() as operator:
        reply = operator.request("drain", replica=replica, reason="test")
    assert reply.code == "ok", reply
    return reply.text


def finish(job: Job) -> None:
    """The running step is the last."""
    with job.operator() as operator:
        assert operator.request("finish", reason="test").code == "ok"


def events(job: Job, kind: str) -> list[str]:
    with job.operator() as operator:
        return [f"{e.object} {e.reason}" for e in operator.request("events").events if e.kind == kind]


def counts(job: Job, replica: str) -> dict[int, int]:
    """Step -> how many contributed."""
    return {line["step"]: len(line["contributors"]) for line in job.lines(replica, "step")}


def test_a_drain_with_a_spare_changes_not_a_bit(job: Job, tmp_path: Path) -> None:
    job.coordinator(replicas=3, options=("--spares", "1"))
    job.start("r0", "r1", "r2", "r3", steps=0, step_ms=25)
    await_state(job, "r3", "spare")
    assert drain(job, "r1").endswith("and r3 takes its place")
    await_state(job, "r3", "contributing")
    assert [text.split(" (")[0] for text in events(job, "replica.promoted")] == [
        "r3 promoted into slot 1 because r1 was drained"
    ]
    job.wait_step("r3", max(job.steps("r0")) + 20)
    finish(job)
    job.assert_finished("r0", "r2", "r3")
    drained = job.assert_identical("r0", "r2", "r3")
    assert counts(job, "r0") == dict.fromkeys(range(1, drained["step"] + 1), 3)
    assert job.lines("r0", "step")[-1]["contributors"] == ["r0", "r3", "r2"], "in the slot of r1"
    (tmp_path / "calm").mkdir()
    calm = Job(tmp_path / "calm")
    try:
        calm.coordinator(replicas=3)
        calm.start("r0", "r1", "r2", steps=drained["step"], step_ms=0)
        calm.assert_finished("r0", "r1", "r2")
        undisturbed = calm.assert_identical("r0", "r1", "r2")
    finally:
        calm.close()
    assert drained["params_digest"] == undisturbed["params_digest"]
    assert drained["optimizer_digest"] == undisturbed["optimizer_digest"]


def test_a_killed_replica_is_replaced_behind_its_step_and_comes_back_as_the_spare(job: Job) -> None:
    job.coordinator(replicas=2, options=("--spares", "1", "--promote-wait", "10s"))
    job.start("r0", "r1", "r2", steps=0, step_ms=25)
    await_state(job, "r2", "spare")
    job.kill("r1")
    await_state(job, "r2", "contributing")
    job.start("r1", steps=0, step_ms=25)
    await_state(job, "r1", "spare")
    job.kill("r0")
    await_state(job, "r1", "contributing")
    assert [text.split(" (")[0] for text in events(job, "replica.promoted")] == [
        "r2 promoted into slot 1 because r1 was lost",
        "r1 promoted into slot 0 because r0 was lost",
    ]
    job.wait_step("r1", max(job.steps("r2")) + 5)
    finish(job)
    job.assert_finished("r1", "r2")
    job.assert_identical("r1", "r2")
    seen = counts(job, "r2") | counts(job, "r1")
    fewer = sorted(step for step, count in seen.items() if count < 2)
    assert len(fewer) <= 2, f"one step each, of the kills: {fewer}\n{job.logs()}"


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_sharded_spare_replaces_a_sharded_replica(job: Job, replicas: int) -> None:
    """FSDP2, two ranks a replica: a drain, then a rank is killed after the drained replica has come back."""
    names = [f"r{i}" for i in range(replicas + 1)]
    job.coordinator(replicas=replicas, options=("--spares", "1", "--promote-wait", "10s"))
    job.start_team(*names, steps=0, step_ms=25)
    spare = names[-1]
    await_state(job, spare, "spare")
    drain(job, "r1")
    await_state(job, spare, "contributing")
    with job.operator() as operator:
        assert operator.request("rejoin", replica="r1").code == "ok"
    for rank in RANKS:
        assert job.exit_code(f"r1/{rank}") == 76
    job.start_team("r1", steps=0, step_ms=25)
    await_state(job, "r1", "spare")
    job.kill(f"{spare}/1")
    await_state(job, "r1", "contributing")
    job.wait_step("r1", max(job.steps("r0")) + 5)
    finish(job)
    left = [name for name in names if name != spare]
    job.assert_finished(*(f"{name}/{rank}" for name in left for rank in RANKS))
    for rank in RANKS:
        job.assert_identical(*(f"{name}/{rank}" for name in left))
    seen = counts(job, "r0")
    assert sorted(seen) == list(range(1, len(seen) + 1))
    assert sum(count < replicas for count in seen.values()) <= 1, seen
