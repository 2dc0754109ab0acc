"""Replicas that live and do not get on, as real processes: told apart from dead ones, and from busy ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftar_core.wire.messages import EventView, JobView

from .conftest import Job, until
from .trainer import Trouble

QUICK = ("--hung-after", "1s", "--hung-factor", "3", "--suspect-after", "20s", "--evict-after", "30s")


def events(job: Job, kind: str, name: str) -> list[EventView]:
    with job.operator() as operator:
        found = operator.request("events").events
    return [event for event in found if (event.kind, event.object) == (kind, name)]


def hung(job: Job, words: str) -> list[str]:
    """What was said of r1 with these words. A busy machine may have it called so at other times as well."""
    return [event.reason for event in events(job, "replica.hung", "r1") if words in event.reason]


def status(job: Job) -> JobView:
    with job.operator() as operator:
        view = operator.request("status").job
    assert view is not None
    return view


def test_a_rank_that_holds_the_gil_is_hung_not_dead_and_one_that_writes_a_checkpoint_is_neither(job: Job) -> None:
    job.coordinator(replicas=3, options=QUICK)
    job.start("r0", "r2", steps=40, step_ms=5)
    troubles = (Trouble("checkpoint", 10, 2.5), Trouble("gil", 20, 4.0))
    job.start("r1", steps=40, step_ms=5, troubles=troubles)
    job.wait_step("r1", 12)
    assert not hung(job, "phase checkpoint"), job.logs()
    until(lambda: hung(job, "has produced 0 buckets of step 20 and then nothing"), job.logs)
    assert "(phase forward)" in hung(job, "step 20 ")[0]
    job.wait_step("r1", 21)
    until(lambda: events(job, "replica.well", "r1"), job.logs)
    job.assert_finished("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    assert all(line["contributors"] == ["r0", "r1", "r2"] for line in job.lines("r0", "step")), "shown, not evicted"


@pytest.fixture
def ranks_socket(job: Job) -> Iterator[str]:
    """Of an agent of the job."""
    job.coordinator(replicas=3, options=(*QUICK, "--hung-after", "5s", "--evict-hung", "--evidence-wait", "60s"))
    with tempfile.TemporaryDirectory(prefix="ft-") as short:
        tokens = job.path / "tokens.yaml"
        tokens.touch(mode=0o600)
        tokens.write_text("[{principal: ann, role: viewer, token: viewer-token-0000}]")
        config = {
            "node": "node1",
            "state_dir": f"{short}/state",
            "listen": None,
            "unix_socket": f"{short}/a.sock",
            "ranks_socket": f"{short}/ranks.sock",
            "tokens_file": str(tokens),
            "watch_links": False,
            "coordinator": {"address": f"127.0.0.1:{job.port}", "job": "t", "token_file": str(job.path / "operator")},
        }
        file = job.path / "agent.yaml"
        file.write_text(json.dumps(config))
        with (job.path / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "agents.daemon", "--config", str(file)], stdout=log, stderr=log
            )
        try:
            until(Path(f"{short}/ranks.sock").exists, job.logs)
            yield f"{short}/ranks.sock"
        finally:
            agent.terminate()
            agent.wait(90)


def test_a_deadlocked_rank_is_evicted_with_its_stacks_where_the_operator_opted_in(job: Job, ranks_socket: str) -> None:
    job.start("r0", "r2", steps=60, step_ms=5)
    troubles = (Trouble("lock", 15, 0.0),)
    job.start("r1", steps=60, step_ms=5, troubles=troubles, environment={"FTAR_AGENT": ranks_socket})
    until(lambda: events(job, "replica.evicted", "r1"), job.logs)
    (evicted,) = events(job, "replica.evicted", "r1")
    assert evicted.reason.startswith("hung: it has produced 0 buckets of step 15")
    assert evicted.evidence.startswith(f"rank 0 (pid {job.replicas['r1'].pid} on node1) is waiting"), evicted.evidence
    assert "trainer.py" in evicted.evidence.splitlines()[0]
    assert "in happen" in evicted.evidence
    job.assert_finished("r0", "r2")
    job.assert_identical("r0", "r2")
    assert job.replicas["r1"].exitcode is None, "it sits in its lock"
    assert job.steps("r0") == list(range(1, 61))


def test_a_checkpoint_that_takes_longer_than_its_budget_is_said(job: Job) -> None:
    job.coordinator(replicas=2, options=QUICK)
    job.start("r0", steps=30, step_ms=5)
    job.start("r1", steps=30, step_ms=5, troubles=(Trouble("checkpoint", 10, 4.0, budget=1.0),))
    until(lambda: any("in phase checkpoint" in e.reason for e in events(job, "replica.overdue", "r1")), job.logs)
    until(lambda: hung(job, "longer than its budget"), job.logs)
    job.assert_finished("r0", "r1")


def test_a_straggler_is_hinted_at_with_its_pace(job: Job) -> None:
    job.coordinator(replicas=3, options=("--straggler-steps", "8"))
    job.start("r0", "r2", steps=25, step_ms=10)
    job.start("r1", steps=25, step_ms=300)
    until(lambda: events(job, "replica.straggler", "r1"), job.logs)
    (hint,) = events(job, "replica.straggler", "r1")
    assert "x the median of the others" in hint.reason
    slow = next(r for r in status(job).replicas if r.name == "r1")
    assert slow.straggler
    assert slow.compute_ms is not None
    assert slow.compute_ms >= 300
    assert slow.pace is not None
    assert slow.pace > 1.5
    assert not events(job, "replica.straggler", "r0")
    job.assert_finished("r0", "r1", "r2")
