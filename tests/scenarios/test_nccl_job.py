"""A job that runs through the NCCL plugin's interface and nothing else of ours, in a lab, as its operator sees it: a
rail goes down under traffic and comes back; status says so at every turn, and no byte is wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab.conftest import needs_namespaces

from ftctl.app import main
from ftctl.context import World
from ftctl.lab import teardown
from ftctl.lab.manifest import load_manifest
from ftctl.lab.paths import LabPaths, runtime_dir_for
from ftctl.lab.processes import processes_of

FTCTL = Path(sys.executable).with_name("ftctl")
NODES = ("node0", "node1")


pytestmark = [needs_namespaces, pytest.mark.timeout(240)]


@dataclass
class Operator:
    state: Path

    def types(self, *args: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FTCTL_", "FTAR_")) or name == "FTCTL_TIMEOUT"
        }
        # On a machine that is busy with other tests, a rail that is silent for 150 ms is no sign of anything.
        env = {**kept, "FTCTL_STATE_DIR": str(self.state), "FTAR_NET_OPTIONS": "heartbeat_misses=100"}
        return subprocess.run(
            [str(FTCTL), *args], env=env, cwd=self.state, capture_output=True, text=True, timeout=180, check=False
        )

    def does(self, *args: str) -> str:
        done = self.types(*args)
        assert done.returncode == 0, f"ftctl {' '.join(args)}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def sees(self, *args: str) -> dict[str, Any]:
        """As JSON. In this process: looking again and again is what would take the time."""
        stdout = io.StringIO()
        world = World(environ={}, stdout=stdout, stderr=io.StringIO(), cwd=self.state)
        main([*args, "-o", "json"], world)
        document: dict[str, Any] = json.loads(stdout.getvalue())
        return document

    @property
    def paths(self) -> LabPaths:
        return LabPaths(self.state / "labs" / "lab")

    def traffic(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.sees("lab", "status")["labs"][0]["traffic"]
        return found

    def until(self, true: Callable[[dict[str, Any]], bool], what: str, within_s: float = 90.0) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while not true(status := self.sees("status")):
            assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}; {json.dumps(status['nodes'])}"
            time.sleep(0.2)
        return status

    def moves_on(self) -> None:
        """Every rank checks more bytes than it had."""
        before = [one["bytes_checked"] for one in self.traffic()]
        self.until(
            lambda _: all(now["bytes_checked"] > then for now, then in zip(self.traffic(), before, strict=True)),
            "bytes go on to come",
        )


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    somebody = Operator(Path(tempfile.mkdtemp(prefix="ftctl-test-")))
    monkeypatch.setenv("FTCTL_STATE_DIR", str(somebody.state))
    try:
        yield somebody
    finally:
        if somebody.paths.root.exists():
            teardown.take_down(somebody.paths, grace_s=0)
        shutil.rmtree(somebody.state, ignore_errors=True)


def process(status: dict[str, Any], node: str) -> dict[str, Any]:
    (view,) = [one for one in status["nodes"] if one["name"] == node]
    (found,) = view["link_processes"]
    return dict(found)


def rail(status: dict[str, Any], node: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in process(status, node)["rails"] if one["rail"] == name]
    return dict(found)


def test_a_rail_goes_down_under_nccls_traffic_and_its_operator_sees_all_of_it(operator: Operator) -> None:
    operator.does("lab", "up", "--job", "nccl", "--replicas", "2", "--step-ms", "100")
    uuid = load_manifest(operator.paths.manifest).uuid

    status = operator.sees("status")
    assert status["job"]["state"] == "uncoordinated"
    assert status["problems"] == []
    for number, node in enumerate(NODES):
        seen = process(status, node)
        assert (seen["kind"], seen["rank"], seen["job"], seen["links"], seen["peers"]) == (
            "nccl",
            str(number),
            "lab",
            4,
            1,
        )
        assert [r["states"] for r in seen["rails"]] == [{"UP": 4}, {"UP": 4}]
        assert [r["active"] for r in seen["rails"]] == [2, 2]  # two channels, each with its own rail
    pids = [process(status, node)["pid"] for node in NODES]
    operator.moves_on()

    operator.does("inject", "link-down", "--node", "node1", "--nic", "rail0", "--duration", "120s", "--reason", "test")
    status = operator.until(
        lambda s: rail(s, "node1", "rail0")["states"] == {"DOWN": 4} and rail(s, "node0", "rail0")["up"] == 0,
        "rail0 is down at both ends",
    )
    here, there = rail(status, "node1", "rail0"), rail(status, "node0", "rail0")
    assert "carrier" in here["reason"] or "down" in here["reason"]
    assert (here["active"], here["moved"], here["flaps"]) == (0, {"rail1": 2}, 1)
    assert here["detect_ms"] is not None
    assert there["moved"] == {"rail1": 2}
    assert rail(status, "node1", "rail1")["active"] == 4
    assert process(status, "node1")["resumes"] >= 2
    assert all(problem["expected"] for problem in status["problems"])
    assert status["recommended"]["action"].startswith("ftctl revert")
    assert "it carries nothing: 0/4 links, 2 moved to rail1" in operator.does("why", "rail", "node1/rail0")
    assert {row["state"] for row in operator.sees("links", "--node", "node1", "--rail", "rail0")["links"]} == {"DOWN"}
    operator.moves_on()

    operator.does("revert", "--all")
    # On a busy machine the hold-down may be over before it is seen; that there was one, the events say below.
    status = operator.until(
        lambda s: rail(s, "node1", "rail0")["states"] in ({"HOLD": 4}, {"UP": 4}), "rail0 is in hold-down, or over it"
    )
    if rail(status, "node1", "rail0")["states"] == {"HOLD": 4}:
        assert 0 < rail(status, "node1", "rail0")["hold_left_s"] <= 3
    operator.until(
        lambda s: all(rail(s, n, "rail0")["states"] == {"UP": 4} and rail(s, n, "rail0")["active"] == 2 for n in NODES),
        "the traffic is back on rail0",
    )
    operator.moves_on()

    def told_so_far() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = operator.sees("events")["events"]
        return [event for event in events if event["kind"] == "link.rail" and event["object"] == "node1/rail0"]

    # A change is told when no more connections can join it, so up to a poll later than the state is seen.
    operator.until(
        lambda _: any("rail0 is UP: hold-down is over" in event["reason"] for event in told_so_far()),
        "the end of the hold-down is told",
    )
    told = told_so_far()
    reasons = [event["reason"] for event in told]
    assert len(set(zip([event["time"] for event in told], reasons, strict=True))) == len(told)  # each once
    lost = [event for event in told if " lost rail0: " in event["reason"]]
    assert all(event["injected"] for event in lost)
    assert sum(int(event["reason"].split("): ")[1].split()[0].replace("a", "1")) for event in lost) == 4
    assert any("in hold-down" in reason for reason in reasons), reasons

    assert [process(operator.sees("status"), node)["pid"] for node in NODES] == pids  # nobody was started again
    for one in operator.traffic():
        assert one["bytes_wrong"] == 0, one["first_wrong"]
        assert one["messages_checked"] > 0
        assert one["longest_ms"] < 10_000

    operator.does("lab", "down")
    assert processes_of(uuid) == []
    assert not runtime_dir_for(uuid).exists()
    assert not operator.paths.root.exists()
