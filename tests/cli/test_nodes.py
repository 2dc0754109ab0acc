"""cordon, uncordon and drain of nodes: a node is emptied before somebody takes it out of its rack."""

from __future__ import annotations

from agents.api import models as m

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import FakeJob


def job_of(cluster: FakeCluster) -> FakeJob:
    assert cluster.job is not None
    return cluster.job


def test_a_cordoned_node_is_shown_with_who_why_and_since_and_is_no_alarm(ftctl: Run, cluster: FakeCluster) -> None:
    done = ftctl("cordon", "node", "node[1-2]", "--reason", "bad optic")
    assert done.code == 0
    assert "node1: cordoned\nnode2: cordoned\n" in done.err
    assert "ftctl uncordon node node1,node2" in done.err
    status = ftctl("status")
    assert status.code == 0
    assert "cordoned" in status.out
    assert "node1: cordoned by operator " in status.out
    assert " ago: bad optic; no replica is started on it" in status.out
    document = ftctl("status", "-o", "json").json()
    assert [node["cordon"] and node["cordon"]["reason"] for node in document["nodes"]] == [
        None,
        "bad optic",
        "bad optic",
    ]
    again = ftctl("cordon", "node", "node1", "--reason", "me too")
    assert again.code == 0
    assert "node1: is cordoned already, by operator: bad optic" in again.err
    free = ftctl("uncordon", "node", "node[0-1]")
    assert free.code == 0
    assert "node0: was not cordoned\nnode1: uncordoned\n" in free.err
    assert (cluster["node1"].cordon, cluster["node2"].cordon is None) == (None, False)


def test_a_dry_run_changes_nothing(ftctl: Run, cluster: FakeCluster) -> None:
    assert "would be cordoned" in ftctl("cordon", "node", "node1", "--reason", "x", "--dry-run").err
    drained = ftctl("drain", "node", "node1", "--reason", "x", "--dry-run", "-o", "json")
    assert drained.code == 0
    said = drained.json()
    assert (said["dry_run"], said["nodes"][0]["changed"], said["replicas"][0]["name"]) == (True, True, "r1")
    assert cluster["node1"].cordon is None
    assert job_of(cluster).replicas["r1"].state == "contributing"


def test_names_and_reasons_are_checked_before_anything_is_done(ftctl: Run, cluster: FakeCluster) -> None:
    for words in (
        ("cordon", "node", "node9", "--reason", "x"),
        ("cordon", "node", "node[1", "--reason", "x"),
        ("cordon", "node", "node1", "--reason", " "),
        ("cordon", "node", "node1"),
        ("drain", "node", "node1", "--reason", "x", "--wait-timeout", "soon"),
    ):
        wrong = ftctl(*words)
        assert wrong.code == 2, wrong.err
        assert wrong.err.startswith("error: ")
    assert all(agent.cordon is None for agent in cluster.agents.values())


def test_a_drained_node_is_cordoned_and_every_replica_with_a_rank_there_has_left(
    ftctl: Run, cluster: FakeCluster
) -> None:
    job = job_of(cluster)
    cluster["node2"].processes += [m.ProcessView(replica="r1", rank=1, pid=1001, state="running", log="/logs/r1")]
    job.min_replicas = 1
    done = ftctl("drain", "node", "node2", "--reason", "new firmware")
    assert done.code == 0, done.err
    assert [r.state for r in job.replicas.values()] == ["contributing", "drained", "drained"]
    assert "r1: drained\nr2: drained\n" in done.err
    assert "ftctl uncordon node node2 && ftctl rejoin replica r1 && ftctl rejoin replica r2" in done.err
    assert cluster["node2"].cordon is not None
    assert "ftctl uncordon node node2   # then: ftctl rejoin replica r2" in ftctl("status", "--problems").out
    # Also a replica whose other rank's agent is not set apart cannot come back: it would stay broken.
    for name in ("r1", "r2"):
        refused = ftctl("rejoin", "replica", name)
        assert refused.code == 7
        assert "node2 is cordoned by operator: new firmware" in refused.err
        assert "ftctl uncordon node node2" in refused.err
    nobody = ftctl("drain", "node", "node2", "--reason", "again")
    assert nobody.code == 0
    assert "no replica of the job is there" in nobody.err
    assert ftctl("uncordon", "node", "node2").code == 0
    assert ftctl("rejoin", "replica", "r1").code == 0


def test_a_spare_on_the_node_leaves_first_lest_it_be_promoted(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)
    job.min_replicas = 1
    job.set("r2", "spare", nodes=["node1"])
    cluster["node2"].processes = []
    cluster["node1"].processes += [m.ProcessView(replica="r2", rank=0, pid=1002, state="running")]
    assert ftctl("drain", "node", "node1", "--reason", "x").code == 0
    assert [(verb, name) for (_n, verb, _w), name in zip(job.actions, ("r2", "r1"), strict=True)] == [
        ("drain", "r2"),
        ("drain", "r1"),
    ]
    assert (job.replicas["r1"].state, job.replicas["r2"].state) == ("drained", "drained")


def test_the_guard_counts_all_replicas_of_all_nodes_together(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)  # three replicas, at least two
    refused = ftctl("drain", "node", "node[1-2]", "--reason", "x")
    assert refused.code == 7
    assert "1 contributors would be left, min-replicas is 2; nothing was done" in refused.err
    assert "--force" in refused.err
    assert (job.actions, cluster["node1"].cordon) == ([], None)
    refused = ftctl("drain", "node", "node[0-2]", "--reason", "x", "--force")
    assert refused.code == 7
    assert "no contributor would be left" in refused.err
    assert (job.actions, cluster["node1"].cordon) == ([], None)
    assert ftctl("drain", "node", "node[1-2]", "--reason", "x", "--force").code == 0
    assert job.replicas["r0"].state == "contributing"


def test_what_did_not_come_true_is_said_with_its_exit_code(ftctl: Run, cluster: FakeCluster) -> None:
    job = job_of(cluster)
    cluster["node1"].stop()
    done = ftctl("drain", "node", "node1", "--reason", "its agent is dead", "-o", "json")
    assert done.code == 6
    assert "agent of node1" in done.json()["nodes"][0]["error"]
    assert job.replicas["r1"].state == "drained", "any agent can carry a drain"
    cluster["node1"].start()
    cluster.job = None
    lost = ftctl("drain", "node", "node2", "--reason", "x")
    assert lost.code == 1
    assert "nothing was done" in lost.err
    assert "ftctl cordon node node2" in lost.err
    assert cluster["node2"].cordon is None
