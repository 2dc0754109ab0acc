"""`ftctl status`: what the operator sees, and what scripts decide on."""

from __future__ import annotations

import re
import time

from agents.api import models as m
from agents.api.job import CheckpointState
from ftctl.context import World

from .conftest import Run
from .fake_agent import FakeCluster, nic
from .fake_job import replica


def test_a_healthy_cluster_on_one_page(ftctl: Run) -> None:
    result = ftctl("status")
    assert result.code == 0
    assert result.err == ""
    assert "job main  running  step 100  epoch 1.7" in result.out
    assert "contributors r0 r1 r2 (3 of 3, at least 2)" in result.out
    assert "no GPUs (NVML not found)" in result.out
    assert "rail0 up 10G active" in result.out
    assert "mgmt0" not in result.out
    assert "healthy: nothing to do" in result.out
    assert "\x1b" not in result.out  # no colours where there is no terminal


def test_the_json_document_has_the_published_keys(ftctl: Run, cluster: FakeCluster) -> None:
    ftctl("inject", "link-down", "--node", "node1", "--nic", "rail0", "--duration", "20s", "--reason", "try")
    document = ftctl("status", "-o", "json").json()
    assert document["schema"] == 1
    assert set(document["job"]) >= {"name", "step", "term", "epoch", "contributors"}
    assert [node["name"] for node in document["nodes"]] == ["node0", "node1", "node2"]
    for node in document["nodes"]:
        assert set(node) >= {"name", "agent", "rails", "gpus"}
        assert node["agent"]["pid"] == 77
        assert node["agent"]["age_s"] == 12.5
        assert [rail["name"] for rail in node["rails"]] == ["rail0", "rail1"]
    assert set(document["replicas"][0]) >= {"name", "state", "step", "nodes"}
    (fault,) = document["faults"]
    assert set(fault) >= {"id", "kind", "target", "state", "ttl_left_s", "owner"}
    assert (fault["kind"], fault["target"], fault["state"]) == ("link-down", "node1/rail0", "active")
    (problem,) = document["problems"]
    assert set(problem) >= {"object", "reason", "action"}
    assert problem["object"] == "node1/rail0"
    assert problem["action"] == f"ftctl revert {fault['id']}"
    assert document["recommended"]["action"] == problem["action"]


def test_the_newest_checkpoint_and_why_the_one_after_it_is_not_there(ftctl: Run, cluster: FakeCluster) -> None:
    assert ftctl("status", "-o", "json").json()["job"]["checkpoint"] is None
    cluster.job.checkpoint = CheckpointState(step=80, time=time.time() - 90, bytes=12_400_000, seconds=1.5)
    assert "checkpoint step 80, 12.4 MB, 1m30s ago" in ftctl("status").out
    kept = {"failed_step": 90, "failed_time": time.time() - 4, "failed": "r1: /k: No space left", "failures": 1}
    cluster.job.checkpoint = cluster.job.checkpoint.model_copy(update=kept)
    line = r"^no checkpoint of step 90, \d+(\.\d)?s ago: r1: /k: No space left$"
    assert re.search(line, ftctl("status").out, re.MULTILINE)
    document = ftctl("status", "-o", "json").json()["job"]["checkpoint"]
    assert (document["step"], document["bytes"], document["write_s"]) == (80, 12_400_000, 1.5)
    assert 90 <= document["age_s"] < 150
    assert (document["failed"]["step"], document["failed"]["reason"]) == (90, "r1: /k: No space left")
    cluster.job.checkpoint = cluster.job.checkpoint.model_copy(update={"step": 100, "time": time.time()})
    assert "no checkpoint" not in ftctl("status").out, "a newer one is complete"


def test_an_injected_fault_is_named_as_such_and_is_no_reason_to_page_anybody(ftctl: Run) -> None:
    ftctl("inject", "link-down", "--node", "node1", "--nic", "rail0", "--duration", "20s")
    result = ftctl("status")
    assert result.code == 0
    assert "rail0 down (injected)" in result.out
    assert "injected by operator" in result.out
    assert "recommended: ftctl revert" in result.out


def test_a_rail_that_lost_its_carrier_by_itself_is_unhealthy(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node2"].nics = [nic("rail0", carrier=False, state=m.Health.UNHEALTHY, reason="no carrier for 3 s")]
    result = ftctl("status")
    assert result.code == 1
    assert "node2/rail0: no carrier: no carrier for 3 s" in result.out
    assert "check cable, optic and switch port of node2/rail0" in result.out


def test_one_dead_agent_costs_a_row_not_the_answer(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node1"].stop()
    result = ftctl("status")
    assert result.code == 6
    assert "unreachable" in result.out
    assert "nobody listens on" in result.out
    assert "job main  running" in result.out
    assert result.out.count("pid 77") == 2
    document = ftctl("status", "-o", "json").json()
    assert document["nodes"][1]["agent"] is None
    assert any(p["object"] == "node1" for p in document["problems"])


def test_an_agent_that_hangs_costs_its_deadline_only(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node0"].mode = "hang"  # the first one asked for the job as well
    result = ftctl("status", "--timeout", "2s")
    assert result.code == 6
    assert "no answer within 2s" in result.out
    assert "job main  running" in result.out


def test_a_dead_coordinator_still_leaves_what_the_ranks_report(ftctl: Run, cluster: FakeCluster) -> None:
    cluster.job = None
    result = ftctl("status")
    assert result.code == 1
    assert "job main  unknown" in result.out
    assert "nobody listens on 10.0.0.1:7600" in result.out
    assert "recommended: ftctl coordinator status" in result.out
    document = ftctl("status", "-o", "json").json()
    assert document["job"]["step"] == 100
    assert [r["name"] for r in document["replicas"]] == ["r0", "r1", "r2"]


def test_a_finished_job_is_no_problem(ftctl: Run, cluster: FakeCluster) -> None:
    cluster.job = None
    for agent in (cluster[name] for name in ("node0", "node1", "node2")):
        agent.processes = [
            p.model_copy(update={"state": "exited", "exit_code": 0, "pid": None}) for p in agent.processes
        ]
    result = ftctl("status")
    assert "job main  finished" in result.out
    assert "recommended" not in result.out
    assert result.code == 0
    assert ftctl("status", "-o", "json").json()["job"]["state"] == "finished"
    agent.processes = [p.model_copy(update={"exit_code": 75}) for p in agent.processes]
    assert "job main  unknown" in ftctl("status").out


def test_a_stuck_fault_comes_before_everything_else(ftctl: Run, cluster: FakeCluster) -> None:
    ftctl("inject", "link-down", "--node", "node1", "--nic", "rail0")
    agent = cluster["node1"]
    agent.faults = [
        f.model_copy(update={"state": m.FaultState.STUCK, "detail": "no such device"}) for f in agent.faults
    ]
    cluster["node2"].stop()
    result = ftctl("status", "--problems")
    assert result.code == 5
    assert "could not be taken back: no such device" in result.out
    assert "ip link set rail0 up" in result.out
    document = ftctl("status", "-o", "json").json()
    assert document["problems"][0]["object"].startswith("fault ")
    assert document["stuck"][0]["undo"] == ["ip link set rail0 up"]
    page = ftctl("status")
    assert page.code == 5
    lines = page.out.splitlines()
    assert lines[0].startswith("FAULT f-node1-0 COULD NOT BE TAKEN BACK: link-down on node1/rail0: no such device")
    assert "    ip link set rail0 up" in lines, "on a line of its own, to be copied"
    assert "then: ftctl revert f-node1-0" in lines


def test_a_ledger_that_cannot_be_read_may_hide_a_fault(ftctl: Run, cluster: FakeCluster) -> None:
    reason = "ledger entry f.json cannot be read (damaged): a fault may be in force"
    cluster["node1"].problems = [m.ProblemView(object="node1", reason=reason, action="rm f.json", in_force=True)]
    page = ftctl("status")
    assert page.code == 5
    assert page.out.startswith("A FAULT MAY BE IN FORCE ON node1: ledger entry f.json")


def test_yaml_and_wide_and_stalls(ftctl: Run, cluster: FakeCluster) -> None:
    assert cluster.job is not None
    cluster.job.stalls = [
        m.StallState(
            time=time.time() - 3,
            kind="replica-lost",
            replica="r2",
            step=90,
            detect_ms=12.0,
            stall_ms=210.0,
            reason="connection closed",
        )
    ]
    assert "replica-lost" in ftctl("status").out
    assert "210 ms" in ftctl("status").out
    assert "10.1.0.1/24" in ftctl("status", "-o", "wide").out
    assert "mgmt0" in ftctl("status", "--all").out
    assert ftctl("status", "-o", "yaml").out.startswith("---\nschema: 1\n")


def test_a_replica_that_is_away_is_explained(ftctl: Run, cluster: FakeCluster) -> None:
    assert cluster.job is not None
    cluster.job.replicas["r1"] = replica("r1", "node1", "evicted", reason="heartbeats missed for 2.1 s")
    cluster["node1"].processes = []
    result = ftctl("status")
    assert result.code == 1
    assert re.search(r"r1: evicted for [\d.]+s: heartbeats missed for 2.1 s", result.out)
    assert "recommended: ftctl rejoin replica r1" in result.out


def test_the_environment_chooses_the_output_and_a_flag_overrides_it(ftctl: Run, world: World) -> None:
    world.environ = {**world.environ, "FTCTL_OUTPUT": "json"}
    assert ftctl("status").json()["schema"] == 1
    assert ftctl("status", "-o", "table").out.startswith("job main")
    world.environ = {**world.environ, "FTCTL_OUTPUT": "xml"}
    result = ftctl("status")
    assert result.code == 2
    assert "FTCTL_OUTPUT" in result.err
