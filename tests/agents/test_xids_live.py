"""Xids of simulated GPUs in a real agent: verdict, event, incident; the table, and an operator's own rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_agent import LiveAgent, live_agent, until

from agents.host.simgpus import SimulatedGpus

OURS = """version: 1
xids:
  - {codes: [32], health: unhealthy, action: evict}
  - {codes: [9999], meaning: one of ours, health: healthy, action: watch}
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveAgent]:
    table = tmp_path_factory.mktemp("table") / "xids.yaml"
    table.write_text(OURS)
    with live_agent(simulated_gpus={"count": 8}, xid_table=str(table), nvml_deadline_s=60) as one:
        one.start()
        until(lambda: len(one.get("/v1/node").json()["gpus"]["devices"]) == 8, "its GPUs are read", 60)
        yield one


def gpus(agent: LiveAgent) -> SimulatedGpus:
    return SimulatedGpus(agent.state / "gpus" / "state")


def events(agent: LiveAgent, gpu: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = agent.get("/v1/events").json()["events"]
    return [event for event in found if event["object"] == f"node1/gpu{gpu}" and event["kind"].startswith("gpu.")]


@pytest.mark.parametrize(
    ("gpu", "code", "kind", "action"),
    [
        (1, 79, "gpu.unhealthy", "evict_node"),
        (2, 31, "gpu.degraded", "restart"),
        (3, 63, "gpu.recorded", "reset_idle"),
        (4, 4711, "gpu.degraded", "check"),  # unknown: shown all the same
        (5, 32, "gpu.unhealthy", "evict"),  # as the operator's table has it
        (6, 9999, "gpu.recorded", "watch"),
    ],
)
def test_an_xid_is_a_verdict_with_an_incident(agent: LiveAgent, gpu: int, code: int, kind: str, action: str) -> None:
    gpus(agent).raise_xid(gpu, code)
    until(lambda: bool(events(agent, gpu)), "the event", 60)
    event = events(agent, gpu)[0]
    assert (event["kind"], event["action"], event["injected"]) == (kind, action, True)
    assert event["reason"].startswith(f"Xid {code}: ")
    assert f"Xid {code}" in event["evidence"]
    known = agent.get("/v1/health", "viewer").json()["incidents"]  # those that are over by now, too
    (incident,) = [one for one in known if one["id"] == event["incident"]]
    assert (incident["codes"], incident["count"], incident["simulated"]) == ([f"xid.{code}"], 1, True)
    assert incident["uuid"].startswith("GPU-")


def test_a_lost_gpu_is_in_the_incident_of_its_xid(agent: LiveAgent) -> None:
    gpus(agent).raise_xid(7, 79)
    old = gpus(agent).set_lost(7)
    until(lambda: len(events(agent, 7)) == 2, "both are told", 60)
    xid, lost = sorted(events(agent, 7), key=lambda event: "Xid" not in event["reason"])
    assert (lost["action"], "cannot be read" in lost["reason"]) == ("evict", True)
    assert lost["incident"] == xid["incident"]
    gpus(agent).restore(old)
    until(lambda: events(agent, 7)[-1]["kind"] == "gpu.healthy", "it is well again", 60)
    assert events(agent, 7)[-1]["incident"] == xid["incident"]


def test_a_changed_recovery_action_is_what_the_driver_asks_for(agent: LiveAgent) -> None:
    old = gpus(agent).set_recovery_action(0, 2)
    gpus(agent).raise_xid(0, 154)
    until(lambda: any("Xid 154" in event["reason"] for event in events(agent, 0)), "the event", 60)
    xid = next(event for event in events(agent, 0) if "Xid 154" in event["reason"])
    assert (xid["action"], "reboot the node" in xid["reason"]) == ("evict_node", True)
    gpus(agent).restore(old)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 1\nxids:\n  - {codes: [31], acton: evict}\n", ":3: unknown key 'acton'"),
        ("version: 1\nxids:\n  - {codes: [31], action: fly}\n", ":3: action 'fly' is none of"),
        ("version: 1\nxids:\n  - {codes: [7777], action: evict}\n", ":3: Xid 7777 is new, so meaning is needed"),
        ("version: 1\nxids:\n  - {codes: [31]}\n  - {codes: [31]}\n", ":4: Xid 31 is on line 3 already"),
        ("version: 1\nxids:\n  - {codes: []}\n", ":3: codes must be a list"),
        ("version: 2\n", ":1: version must be 1"),
        ("xids: [\n", "not YAML"),
    ],
)
def test_a_table_that_cannot_be_used_is_named_by_line(tmp_path: Path, text: str, says: str) -> None:
    from agents.health.xidtable import XidTableProblem, read

    path = tmp_path / "xids.yaml"
    path.write_text(text)
    with pytest.raises(XidTableProblem) as caught:
        read(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(json.dumps(str(path))[1:-1])
