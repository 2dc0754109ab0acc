"""From an injected Xid to `ftctl health`, the chain of its incident, /metrics, and `ftctl clear`, with a real agent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ftctl.context import World

from .conftest import Result, Run
from .test_real_agent import VIEWER, RealAgent


@pytest.fixture
def agent(folder: Path) -> Iterator[RealAgent]:
    real = RealAgent(folder)
    config = folder / "agent.yaml"
    config.write_text(
        f"{config.read_text()}nvml_deadline_s: 60\nkernel_log: null\nrails: [rail-gone]\nsimulated_gpus: {{count: 4}}\n"
    )
    real.start()
    yield real
    real.end()


@pytest.fixture
def run(bare: Run, world: World, agent: RealAgent) -> Run:
    def run(*args: str) -> Result:
        return bare(*args, "--inventory", str(agent.folder / "unix.yaml"))

    return run


def verdicts(run: Run, kind: str) -> list[dict[str, Any]]:
    (node,) = run("health", "node0", "-o", "json").json()["nodes"]
    return [verdict for verdict in node["verdicts"] if verdict["kind"] == kind and verdict["code"]]


def until(run: Run, kind: str, number: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while len(found := verdicts(run, kind)) != number:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def test_an_xid_from_its_verdict_to_the_end_of_its_incident(run: Run, agent: RealAgent) -> None:
    deadline = time.monotonic() + 60
    while len(run("status", "-o", "json").json()["nodes"][0]["gpus"]) < 4:
        assert time.monotonic() < deadline, "its GPUs are not read"
        time.sleep(0.2)
    done = run("inject", "gpu-xid", "--node", "node0", "--gpu", "2", "--xid", "46", "--duration", "120s", "-o", "json")
    assert done.code == 0, done.err
    fault = done.json()["faults"][0]["id"]
    (verdict,) = until(run, "gpu", 1)
    incident = verdict["incident"]
    assert (verdict["object"], verdict["code"], verdict["action"], verdict["fault"]) == (
        "gpu 2",
        "xid.46",
        "evict",
        fault,
    )

    shown = run("health", "--explain")
    assert shown.code == 1
    for text in ("Xid 46", incident, f"injected by {fault}", "simulated", "evidence: NVML: Xid 46", "what looks"):
        assert text in " ".join(shown.out.split())

    chain = [json.loads(line) for line in run("events", "--incident", incident, "-o", "json").out.splitlines()]
    first = chain[0]
    assert {"time", "incident", "node", "kind", "object", "verdict", "action", "reason", "injected"} <= set(first)
    told = (first["kind"], first["node"], first["object"], first["verdict"], first["action"], first["injected"])
    assert told == ("gpu.unhealthy", "node0", "node0/gpu2", "unhealthy", "evict", True)
    assert {link["incident"] for link in chain} == {incident}

    with httpx.Client(transport=httpx.HTTPTransport(uds=str(agent.folder / "a.sock"))) as client:
        text = client.get("http://agent/metrics", headers={"Authorization": f"Bearer {VIEWER}"}).text
    assert 'ftctl_verdict{action="evict",code="xid.46",injected="yes",kind="gpu",object="gpu 2"' in text
    assert 'ftctl_incidents_open{kind="gpu"} 1.0' in text

    cleared = run("clear", "gpu", "node0/gpu2", "--reason", "a drill")
    assert (cleared.code, "1 cleared" in cleared.err) == (0, True)
    until(run, "gpu", 0)
    assert "cleared by carla: a drill" in run("events", "--incident", incident).out


def test_what_is_refused(run: Run, agent: RealAgent) -> None:
    until(run, "nic", 1)
    viewer = str(agent.folder / "viewer")
    for arguments, code, text in (
        (("health", "node7"), 2, "node7"),
        (("clear", "nic", "rail-gone", "--reason", "x"), 2, "NODE/PART"),
        (("clear", "nic", "node0/rail7", "--reason", "x"), 2, "nic rail-gone"),
        (("clear", "nic", "node0/rail-gone", "--reason", " "), 2, "empty"),
        (("events", "--incident", "i-0", "-o", "yaml"), 2, "one event a line"),
        (
            ("clear", "nic", "node0/rail-gone", "--reason", "x", "--token-file", viewer),
            7,
            "viewer",
        ),
    ):
        refused = run(*arguments)
        assert (refused.code, text in refused.err) == (code, True), refused.err
    assert "no events of incident i-0" in run("events", "--incident", "i-0").err
