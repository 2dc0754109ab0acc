"""Why a replica keeps the others waiting: one sentence, and the next command."""

from __future__ import annotations

import time

from agents.api.models import EventRecord, ProcessView

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import FakeJob, replica


def job_of(cluster: FakeCluster) -> FakeJob:
    assert cluster.job is not None
    return cluster.job


def evidence(text: str) -> EventRecord:
    return EventRecord(
        seq=9,
        time=time.time(),
        source="coordinator",
        kind="replica.evidence",
        object="r1",
        reason=text.partition("\n")[0],
        evidence=text,
    )


def test_a_hung_replica_is_explained_by_what_its_threads_do(ftctl: Run, cluster: FakeCluster) -> None:
    why = (
        "it has produced 0 buckets of step 7 and then nothing for 12 s (phase forward), while all others wait for 11 s"
    )
    job_of(cluster).replicas["r1"] = replica("r1", "node1", "hung", reason=why)
    job_of(cluster).events.append(
        evidence("rank 0 (pid 7 on node1) is waiting, its main thread at train.py:44 in f\nmore")
    )
    result = ftctl("why", "replica", "r1")
    first = result.out.splitlines()[0]
    assert first.startswith("r1 is hung: it has produced 0 buckets of step 7")
    assert "its main thread at train.py:44 in f" in " ".join(result.out.split())
    assert "next: ftctl dump replica r1 --stacks" in result.out
    whole = ftctl("why", "replica", "r1", "-o", "json").json()
    assert whole["reason"].endswith("is waiting, its main thread at train.py:44 in f")
    assert whole["events"][-1]["evidence"].endswith("more")


def test_a_stopped_process_is_the_reason_and_its_cure_is_the_next_command(ftctl: Run, cluster: FakeCluster) -> None:
    job_of(cluster).replicas["r1"] = replica("r1", "node1", "evicted", reason="silent for 2.0 s")
    cluster["node1"].processes = [ProcessView(replica="r1", rank=0, pid=1000, state="running", status="stopped")]
    result = ftctl("why", "replica", "r1")
    assert "stopped by a signal" in result.out
    assert "next: on node1: kill -CONT 1000" in result.out


def test_a_straggler_is_marked_with_its_pace(ftctl: Run, cluster: FakeCluster) -> None:
    slow = replica("r1", "node1", compute_ms=380.0, wait_ms=2.0, pace=1.9, straggler=True)
    job_of(cluster).replicas["r1"] = slow
    result = ftctl("status", "-o", "wide")
    assert result.code == 0, "a hint is no alarm"
    assert "380 ms" in result.out
    assert "1.9 x" in result.out
    (one,) = [r for r in ftctl("status", "-o", "json").json()["replicas"] if r["name"] == "r1"]
    assert (one["pace"], one["straggler"]) == (1.9, True)
    text = " ".join(ftctl("why", "replica", "r1").out.split())
    assert "computes 380 ms a step (1.9 x the median of the others) and waits 2 ms: a straggler" in text
