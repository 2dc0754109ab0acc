"""`ftctl links`, and links in `ftctl status` and `ftctl why rail`: which rail carries what, and why not."""

from __future__ import annotations

from typing import Any

import pytest
from link_documents import document, link, rail

from agents.api import models as m

from .conftest import Run
from .fake_agent import NOW, FakeCluster, nic


def nccl(number: int, peer: int, *states: str, job: str = "main", **more: Any) -> bytes:
    """Rank `number` with two connections to node `peer`: `states` of rail0 and rail1."""
    first = rail(0, states[0], address=f"10.1.0.{peer + 1}", active=states[0] == "UP", **more)
    second = rail(1, states[1], address=f"10.1.1.{peer + 1}", active=states[0] != "UP")
    moved = int(states[0] != "UP")
    links = [link(n, first, second, peer=f"p{peer}", resumes=moved, direction=d) for n, d in ((1, "out"), (2, "in"))]
    ports = [
        {"name": f"rail{i}", "device": f"rail{i}", "address": f"10.1.{i}.{number + 1}", "carrier": True} for i in (0, 1)
    ]
    return document(links, name=f"p{number}", rank=str(number), rails=ports, job=job)


@pytest.fixture
def plain(cluster: FakeCluster) -> FakeCluster:
    """Two nodes that run NCCL with the plugin and nothing else of ours."""
    cluster.uncoordinated = True
    for number, agent in enumerate(cluster.agents.values()):
        agent.processes = []
        agent.nics = [nic(f"rail{i}", addresses=[f"10.1.{i}.{number + 1}/24"]) for i in (0, 1)]
    cluster["node0"].sees_links((100, nccl(0, 1, "UP", "UP")))
    cluster["node1"].sees_links((101, nccl(1, 0, "UP", "UP")))
    return cluster


def test_a_job_that_only_runs_nccl_is_on_the_page_and_healthy(ftctl: Run, plain: FakeCluster) -> None:
    result = ftctl("status")
    assert result.code == 0, result.out
    assert "job main  uncoordinated" in result.out
    assert "rail0 up 10G active 2/2 links" in result.out
    assert "rail1 up 10G 2/2 links" in result.out
    assert "100 nccl rank 0  node0  main" in result.out
    assert "rail0 2/2 UP active  rail1 2/2 UP" in result.out
    assert "healthy: nothing to do" in result.out
    status = ftctl("status", "-o", "json").json()
    assert status["job"]["state"] == "uncoordinated"
    assert status["nodes"][0]["link_processes"][0]["pid"] == 100
    assert status["nodes"][0]["rails"][1]["links"]["up"] == 2
    assert ftctl("events").code == 0


def test_idle_connections_of_a_peer_that_is_cut_off_are_no_rails_that_work(ftctl: Run, plain: FakeCluster) -> None:
    plain["node0"].sees_links((100, nccl(0, 1, "SILENT", "SILENT", reason="nothing is heard on any rail", since_s=4.0)))
    result = ftctl("status")
    assert result.code == 1
    assert "rail0 0/2 SILENT" in result.out
    words = " ".join(result.out.split())
    assert "node0/rail0: 2 of 2 links do not get through, though the NIC is up: nothing is heard on any rail" in words
    rows = ftctl("links", "--state", "silent", "-o", "json").json()["links"]
    assert {(row["state"], row["up"]) for row in rows} == {("SILENT", 0)}


def test_a_rail_that_went_down_says_where_its_traffic_is(ftctl: Run, plain: FakeCluster) -> None:
    ftctl("inject", "link-down", "--node", "node0", "--nic", "rail0", "--reason", "test")
    why = {"reason": "no carrier: rail0 is down", "since_s": 4.0, "flaps": 1, "detect_ms": 2.0}
    plain["node0"].sees_links((100, nccl(0, 1, "DOWN", "UP", **why)))
    plain["node1"].sees_links((101, nccl(1, 0, "PROBING", "UP", reason="no answer", since_s=3.9)))
    result = ftctl("status")
    assert result.code == 0, result.out  # made on purpose, also at the other end
    assert "rail0 down (injected) 10G 0/2 links, 2 moved to rail1, 1 flap" in result.out
    assert "rail1 up 10G active 2/2 links" in result.out
    assert "rail0 0/2 DOWN  rail1 2/2 UP active" in result.out
    why_rail = ftctl("why", "rail", "node0/rail0")
    assert why_rail.code == 0
    assert "node0/rail0 is down: it carries nothing: 0/2 links, 2 moved to rail1, 1 flap" in why_rail.out
    assert "process 100 (nccl rank 0) on node0" in why_rail.out
    words = " ".join(why_rail.out.split())
    assert "0 of 1 links to node1/rail0 UP; DOWN for 4s: no carrier: rail0 is down" in words
    assert "injected by operator" in words
    assert "next: ftctl revert" in why_rail.out
    far = ftctl("why", "rail", "node1/rail0", "-o", "json").json()
    assert far["rail"] == "node1/rail0"
    assert any("the NIC at the other end is down" in finding["text"] for finding in far["findings"])
    assert any("node0/rail0 is down on purpose" in finding["text"] for finding in far["findings"])
    assert far["action"] == "ftctl why rail node0/rail0"


def test_hold_down_is_shown_and_passes_by_itself(ftctl: Run, plain: FakeCluster) -> None:
    plain["node0"].sees_links((100, nccl(0, 1, "HOLD", "UP", hold_left_ms=800.0, flaps=2)))
    result = ftctl("status")
    assert result.code == 0
    assert "2 moved to rail1, 2 flaps, hold-down 800ms" in result.out
    assert "node0/rail0: works again, 800ms of hold-down left after 2 losses" in result.out
    assert "nothing to do: wait" in result.out


def test_links_that_do_not_get_through_although_the_nic_is_well_are_a_problem(ftctl: Run, plain: FakeCluster) -> None:
    plain["node0"].sees_links((100, nccl(0, 1, "DOWN", "UP", reason="silent for 151 ms", since_s=30.0)))
    result = ftctl("status")
    assert result.code == 1
    assert "node0/rail0: 2 of 2 links do not get through, though the NIC is up: silent for 151 ms" in result.out
    assert "recommended: ftctl why rail node0/rail0" in result.out


def test_a_process_that_does_not_answer_is_a_problem_with_the_next_command(ftctl: Run, plain: FakeCluster) -> None:
    plain["node0"].sees_links((100, b""), now=NOW - 1)
    plain["node0"].links._processes[next(iter(plain["node0"].links._processes))].answered_s = NOW - 10
    result = ftctl("status")
    assert result.code == 1
    assert "node0/pid 100: its links cannot be seen: no answer within 0.8 s" in result.out
    assert "kill -CONT 100" in result.out


def test_links_has_a_row_for_each_peer_and_rail_and_filters(ftctl: Run, plain: FakeCluster) -> None:
    plain["node0"].sees_links((100, nccl(0, 1, "DOWN", "UP", reason="no carrier", since_s=4.0, flaps=1)))
    lines = ftctl("links").out.splitlines()
    assert len(lines) == 1 + 2 * 4
    assert any(line.split()[:7] == ["node0", "100", "nccl", "rank", "0", "to", "node1"] for line in lines)
    rows = ftctl("links", "--state", "down", "-o", "json").json()["links"]
    assert [(r["node"], r["peer_node"], r["rail"], r["direction"], r["up"]) for r in rows] == [
        ("node0", "node1", "rail0", "in", 0),
        ("node0", "node1", "rail0", "out", 0),
    ]
    assert {r["node"] for r in ftctl("links", "--node", "node1", "-o", "json").json()["links"]} == {"node1"}
    assert {r["rail"] for r in ftctl("links", "--rail", "rail1", "-o", "json").json()["links"]} == {"rail1"}
    assert [r["link"] for r in ftctl("links", "--each", "--pid", "100", "-o", "json").json()["links"]] == [2, 2, 1, 1]
    assert "retransmits" in ftctl("links", "-o", "wide").out.lower()
    assert "no links like that" in ftctl("links", "--rail", "rail9").err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("links", "--state", "sideways"), 2, "a rail is UP, DOWN, PROBING, HOLD"),
        (("links", "--node", "node9"), 2, "node9"),
        (("why", "rail", "node0"), 2, "NODE/NIC is expected"),
        (("why", "rail", "node0/eth9"), 2, "rail node0/eth9: unknown (known: rail0, rail1)"),
        (("why", "rail", "node9/rail0"), 2, "node9"),
    ],
)
def test_wrong_words_are_one_line(ftctl: Run, plain: FakeCluster, words: tuple[str, ...], code: int, says: str) -> None:
    result = ftctl(*words)
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err


def test_a_training_rank_whose_links_are_seen_twice_is_counted_once(ftctl: Run, cluster: FakeCluster) -> None:
    agent = cluster["node0"]
    rails = [{"name": f"rail{i}", "device": f"rail{i}", "address": "", "carrier": True} for i in (0, 1)]
    ring = document([link(1, rail(0, active=True), rail(1), peer="r1")], kind="ring", name="r0", rails=rails)
    agent.sees_links((1000, ring))  # the pid of its rank
    out = ftctl("status").out
    assert "rail0 up 10G active 1/1 links" in out
    assert "PROCESS" not in out  # the replicas' rows are enough
    agent.reports_links = False
    assert "rail0 up 10G active 1/1 links" in ftctl("status").out
    assert "to r1" in ftctl("links", "--node", "node0").out


def test_an_agent_that_does_not_answer_costs_its_links_and_the_exit_code(ftctl: Run, plain: FakeCluster) -> None:
    plain["node1"].stop()
    result = ftctl("links")
    assert result.code == 6
    assert "100 nccl" in result.out
    assert "error: agent of node1" in result.err


def test_models_with_more_than_we_know_are_read() -> None:
    assert m.LinksAnswer.model_validate({"links": [], "left_out": 0, "new": 1}).links == []
