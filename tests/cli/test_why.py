"""`ftctl why` for nodes and faults, and what a mistyped name is answered with."""

from __future__ import annotations

import time

from agents.api import models as m
from agents.api.cordon import CordonView
from agents.api.words import Health
from ftctl import nearest

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import event


def test_why_a_node_is_as_it_is_from_its_agent_to_the_replicas_on_it(ftctl: Run, cluster: FakeCluster) -> None:
    agent = cluster["node1"]
    well = ftctl("why", "node", "node1")
    assert well.code == 0
    assert well.out.startswith("node1 is healthy\n")
    assert "r1 is contributing at step 100" in well.out
    assert well.out.endswith("next: nothing to do\n")
    agent.nics[0] = agent.nics[0].model_copy(update={"carrier": False, "reason": "no carrier for 3s"})
    agent.events = [
        event(1, "node1", "rail.down", "node1/rail0", "no carrier"),
        event(2, "node1", "rail.down", "node10/rail0", "another node's"),
    ]
    ill = ftctl("why", "node", "node1", "-o", "json").json()
    assert (ill["node"], ill["state"]) == ("node1", "degraded")
    assert ill["reason"] == "node1/rail0: no carrier: no carrier for 3s"
    assert [e["object"] for e in ill["events"]] == ["node1/rail0"]
    assert ill["action"] == "check cable, optic and switch port of node1/rail0"
    agent.cordon = CordonView(by="ann", reason="bad optic", since=time.time())
    apart = ftctl("why", "node", "node1")
    assert apart.out.startswith("node1 is cordoned: by ann: bad optic\n")
    agent.stop()
    gone = ftctl("why", "node", "node1")
    assert gone.code == 0
    assert gone.out.startswith("node1 is unreachable: ")
    assert "r1 is contributing" in gone.out, "what the coordinator says of what runs there"


def test_gpus_that_are_not_hardware_are_called_simulated(ftctl: Run, cluster: FakeCluster) -> None:
    gpu = m.GpuView(index=3, uuid="GPU-3", name="H100", simulated=True, state=Health.UNHEALTHY, reason="GPU is lost")
    cluster["node1"].gpus = m.GpuSummary(devices=[gpu], simulated=True)
    assert "gpu3 H100 (simulated) is unhealthy: GPU is lost\n" in ftctl("why", "node", "node1").out
    problem = ftctl("status", "--problems").out
    assert "node1/gpu3" in problem
    assert "H100 (simulated): GPU is lost" in problem


def test_why_a_fault_is_there_and_how_it_is_taken_back(ftctl: Run, cluster: FakeCluster) -> None:
    agent = cluster["node1"]
    wish = m.InjectRequest(kind="link-down", nic="rail0", reason="a drill")
    ours = agent.fault("node1/rail0", wish, id="f-12345678", detail="rail0 is down", params={"x": 3})
    agent.faults = [ours]
    agent.events = [
        event(
            1, "node1", "fault.active", "node1/rail0", "f-12345678 link-down by ann", time=time.time(), injected=True
        ),
        event(2, "node1", "rail.down", "node1/rail0", "down", time=time.time(), injected=True),
        event(3, "node1", "rail.down", "node1/rail1", "cable", time=time.time()),
    ]
    said = ftctl("why", "fault", "f-1234")
    assert said.code == 0, said.err
    assert said.out.startswith("fault f-12345678 is active: link-down on node1/rail0 by operator (a drill), ")
    for words in ("rail0 is down", "with x 3", "by hand: ip link set rail0 up", "rail0 is up now", "fault.active"):
        assert words in said.out
    assert "rail1" not in said.out
    assert said.out.endswith("next: ftctl revert f-12345678\n")
    agent.faults = [ours.model_copy(update={"state": m.FaultState.STUCK, "detail": "the kernel refused"})]
    stuck = ftctl("why", "fault", "f-12345678", "-o", "json").json()
    assert (stuck["fault"], stuck["state"]) == ("f-12345678", "stuck")
    assert "or by hand on node1: ip link set rail0 up" in stuck["action"]
    agent.faults = [ours.model_copy(update={"state": m.FaultState.REVERTED})]
    assert ftctl("why", "fault", "f-12345678").out.endswith("next: nothing to do\n")


def test_a_mistyped_name_is_answered_with_the_nearest_ones(ftctl: Run, cluster: FakeCluster) -> None:
    wish = m.InjectRequest(kind="noop")
    cluster["node1"].faults = [cluster["node1"].fault("node1", wish, id=f"f-aaaa000{i}") for i in range(2)]
    for words, said in (
        (("node", "nod1"), "nearest: node1"),
        (("replica", "r11"), "known: r0, r1, r2"),
        (("rail", "node1/rial0"), "known: rail0, rail1"),
        (("rail", "nodes1/rail0"), "nearest: node1"),
        (("fault", "f-aaab0001"), "known: f-aaaa0000, f-aaaa0001"),
        (("fault", "f-aaaa"), "2 faults begin so: f-aaaa0000, f-aaaa0001"),
        (("fault", ""), "no agent that answers knows it"),
    ):
        wrong = ftctl("why", *words)
        assert (wrong.code, wrong.out) == (2, ""), wrong.err
        assert said in wrong.err
        assert "next:" in wrong.err


def test_of_many_names_the_nearest_are_said() -> None:
    many = [f"node{i}" for i in range(1000)]
    assert nearest.among("nod77", many).startswith("nearest: node77")
    assert nearest.among("zzz", many) == "known: node0, node1, node10, node100, node101, node102 and 994 more"
    assert nearest.among("x", []) == "known: none"
