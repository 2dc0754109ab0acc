"""drain, evict, rejoin, wait, why, ranks: an operator moves replicas out of the job and back."""

from __future__ import annotations

import threading

import pytest

from agents.api import models as m

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import FakeJob, event, replica


def job_of(cluster: FakeCluster) -> FakeJob:
    assert cluster.job is not None
    return cluster.job


def test_drain_then_rejoin_by_the_agent_that_supervises_it(ftctl: Run, cluster: FakeCluster) -> None:
    drained = ftctl("drain", "replica", "r1", "--reason", "test")
    assert drained.code == 0
    assert "r1: drained" in drained.err
    assert "ftctl rejoin replica r1" in drained.err
    assert ftctl("status").code == 0
    back = ftctl("rejoin", "replica", "main/r1")
    assert back.code == 0
    assert "ftctl wait replica r1 --for contributing" in back.err
    assert [(node, verb) for node, verb, _ in job_of(cluster).actions] == [("node1", "drain"), ("node1", "rejoin")]


def test_a_rejoin_is_complete_when_the_replica_is_the_new_spare(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)
    job.min_replicas, job.spares_wanted, job.replicas_wanted = 1, 1, len(job.replicas) - 1
    job.set("r1", "drained")
    assert "ftctl wait replica r1 --for spare" in ftctl("rejoin", "replica", "r1").err
    job.set("r1", "drained")
    late = ftctl("rejoin", "replica", "r1", "--wait", "--wait-timeout", "0.3s")
    assert late.code == 1
    assert "it is starting" in late.err
    job.after_rejoin = "spare"
    back = ftctl("rejoin", "replica", "r1", "--wait", "--wait-timeout", "5s")
    assert back.code == 0, back.err
    assert "r1: spare" in back.err
    assert "spares r1 (1 of 1)" in ftctl("status").out


def test_the_other_nodes_of_a_replica_are_told_what_to_do_with_its_processes_there(
    ftctl: Run, cluster: FakeCluster
) -> None:
    cluster["node2"].processes += [m.ProcessView(replica="r1", rank=1, pid=1001, state="running", log="/logs/r1")]
    job = job_of(cluster)
    assert ftctl("drain", "replica", "r1", "--reason", "test").code == 0
    assert job.supervised == [], "a drained rank ends by itself"
    assert ftctl("rejoin", "replica", "r1").code == 0
    assert ftctl("evict", "replica", "r1", "--reason", "test", "--yes").code == 0
    assert ftctl("evict", "replica", "r1", "--reason", "test", "--yes", "--stay-out").code == 0
    assert job.supervised == [("node2", verb, "r1") for verb in ("rejoin", "restart", "stop")]
    assert ftctl("rejoin", "replica", "r1").code == 0
    assert job.supervised.pop() == ("node2", "restart", "r1"), "one that was evicted may be frozen there"
    before = list(job.supervised)
    assert ftctl("rejoin", "replica", "r1", "--dry-run").code == 0
    assert job.supervised == before


def test_drain_goes_through_another_agent_when_its_own_is_dead_but_rejoin_cannot(
    ftctl: Run, cluster: FakeCluster
) -> None:
    cluster["node1"].stop()
    assert ftctl("drain", "replica", "r1", "--reason", "test").code == 0
    assert job_of(cluster).actions[0][0] == "node0"
    back = ftctl("rejoin", "replica", "r1")
    assert back.code == 6
    assert "agent of node1" in back.err


def test_an_action_that_may_have_happened_is_never_sent_a_second_time(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node1"].mode = "close-posts"  # it took the request, and nobody knows what became of it
    result = ftctl("evict", "replica", "r1", "--reason", "test", "--yes")
    assert result.code == 6
    assert "agent of node1" in result.err
    posts = [name for name, agent in cluster.agents.items() for method, _ in agent.requests if method == "POST"]
    assert posts == ["node1"]


def test_evict_asks_first_and_says_that_it_is_immediate(ftctl: Run, cluster: FakeCluster) -> None:
    refused = ftctl("evict", "replica", "r2", "--reason", "test", answer="n\n")
    assert refused.code == 1
    assert "immediate" in refused.err
    assert job_of(cluster).actions == []
    assert ftctl("evict", "replica", "r2", "--reason", "test", answer="y\n").code == 0
    assert [verb for _, verb, _ in job_of(cluster).actions] == ["evict"]


def test_evict_without_a_terminal_needs_yes(ftctl: Run, cluster: FakeCluster) -> None:
    result = ftctl("evict", "replica", "r2", "--reason", "test")
    assert result.code == 2
    assert "--yes" in result.err
    assert job_of(cluster).actions == []
    done = ftctl("evict", "replica", "r2", "--reason", "test", "--yes", "--stay-out", "-o", "json")
    assert done.code == 0
    assert done.json()["state"] == "evicted"
    assert job_of(cluster).actions[0][2].rejoin is False


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("drain", "replica", "r9", "--reason", "x"), 2, "replica r9: unknown in job main (known: r0, r1, r2)"),
        (("drain", "replica", "other/r1", "--reason", "x"), 2, "this inventory is of job main"),
        (("drain", "replica", "r1"), 2, "--reason"),
        (("drain", "replica", "r1", "--reason", " "), 2, "needs a reason"),
        (("drain",), 2, "Usage: ftctl drain"),
        (("evict", "replica", "r1"), 2, "--reason"),
        (("rejoin", "replica", "r9"), 2, "unknown in job main"),
        (("wait", "replica", "r1", "--for", "happy"), 2, "'happy' is no state of a replica"),
        (("wait", "replica", "r9", "--for", "contributing"), 2, "unknown in job main"),
        (("wait", "replica", "r1", "--for", "drained", "--timeout", "soon"), 2, "not a duration"),
        (("wait", "replica", "r1", "--for", "drained", "--timeout", "300ms"), 1, "not drained after 300ms"),
        (("why", "replica", "r9"), 2, "unknown in job main"),
        (("ranks", "r9"), 2, "unknown in job main"),
    ],
)
def test_bad_input_is_one_clear_line_and_changes_nothing(
    ftctl: Run, cluster: FakeCluster, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    result = ftctl(*arguments)
    assert result.code == code
    assert expected in result.err
    assert "Traceback" not in result.err
    assert job_of(cluster).actions == []


def test_the_guard_of_the_coordinator_refuses_with_7_and_force_overrides(ftctl: Run, cluster: FakeCluster) -> None:
    job_of(cluster).min_replicas = 3
    refused = ftctl("drain", "replica", "r1", "--reason", "test")
    assert refused.code == 7
    assert "min-replicas" in refused.err
    assert ftctl("drain", "replica", "r1", "--reason", "test", "--force").code == 0


def test_a_dry_run_changes_nothing(ftctl: Run, cluster: FakeCluster) -> None:
    result = ftctl("evict", "replica", "r1", "--reason", "test", "--dry-run")
    assert result.code == 0
    assert result.err.startswith("dry run: r1: evict of r1 accepted")
    assert job_of(cluster).replicas["r1"].state == "contributing"


def test_a_dead_coordinator_is_said_in_one_line(ftctl: Run, cluster: FakeCluster) -> None:
    cluster.job = None
    result = ftctl("drain", "replica", "r1", "--reason", "test")
    assert result.code == 1
    assert "nobody listens on 10.0.0.1:7600" in result.err
    assert ftctl("coordinator", "status").code == 1
    assert ftctl("wait", "replica", "r1", "--for", "drained", "--timeout", "300ms").code == 1


def test_wait_sees_a_replica_come_back(ftctl: Run, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(cluster)
    job.set("r2", "fetching", reason="12 of 40 MB")
    view, looks = job.view, []

    def comes_back() -> m.JobState:
        """When it was looked at so often that everybody, however slow, has seen it fetch."""
        looks.append(1)
        if len(looks) > len(cluster.agents):
            job.set("r2", "contributing", reason="")
        return view()

    monkeypatch.setattr(job, "view", comes_back)
    result = ftctl("wait", "replica", "r2", "--for", "contributing", "--timeout", "20s")
    assert result.code == 0
    assert result.err.splitlines() == ["r2: fetching (12 of 40 MB)", "r2: contributing"]


def test_wait_survives_a_coordinator_that_restarts(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)
    job.set("r2", "fetching")

    def back() -> None:
        job.set("r2", "contributing")
        cluster.job = job

    down, up = threading.Timer(0.3, setattr, (cluster, "job", None)), threading.Timer(1.0, back)
    down.start(), up.start()
    try:
        assert ftctl("wait", "replica", "r2", "--for", "contributing", "--timeout", "20s").code == 0
    finally:
        down.cancel(), up.cancel()


def test_wait_ends_at_once_when_the_job_has_ended(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)
    job.state, job.reason = "finished", "step 500 was the last"
    job.set("r2", "drained")
    result = ftctl("wait", "replica", "r2", "--for", "contributing", "--timeout", "60s")
    assert result.code == 1
    assert "job main is finished (step 500 was the last)" in result.err


def test_why_names_the_cause_the_exit_and_the_next_step(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)
    job.replicas["r1"] = replica("r1", "node1", "evicted", reason="its connection closed")
    job.events = [event(1, "coordinator", "replica.lost", "r1", "its connection closed")]
    cluster["node1"].processes = [
        m.ProcessView(
            replica="r1", rank=0, pid=None, state="backoff", exit_code=-9, restarts=2, next_start_s=0.4, log="/logs/r1"
        )
    ]
    result = ftctl("why", "replica", "r1")
    assert result.code == 0
    assert result.out.startswith("r1 is evicted: its connection closed")
    assert "last ended with signal 9; started again 2 times; starts again in 400ms" in result.out
    assert "replica.lost" in result.out
    assert "next: ftctl wait replica r1 --for contributing" in result.out
    document = ftctl("why", "replica", "r1", "-o", "json").json()
    assert document["state"] == "evicted"
    assert document["events"][0]["kind"] == "replica.lost"


def test_ranks_show_process_and_report_side_by_side(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node2"].processes = [m.ProcessView(replica="r2", rank=0, pid=None, state="stopped", exit_code=76)]
    result = ftctl("ranks")
    assert result.code == 0
    assert "r0.0" in result.out
    assert "stopped, exit 76 (drained)" in result.out
    one = ftctl("ranks", "r0")
    assert "to r9" in one.out
    assert "/logs/node0.log" in one.out
    assert [row["replica"] for row in ftctl("ranks", "-o", "json").json()["ranks"]] == ["r0", "r1", "r2"]


def test_force_quorum_asks_and_goes_through(ftctl: Run) -> None:
    assert ftctl("coordinator", "force-quorum").code == 2
    assert ftctl("coordinator", "force-quorum", "--reason", "r2 is gone").code == 2
    done = ftctl("coordinator", "force-quorum", "--reason", "r2 is gone", "--yes")
    assert done.code == 0
    assert "settled without r2" in done.err
    assert "evict_after_s" in ftctl("coordinator", "status").out
