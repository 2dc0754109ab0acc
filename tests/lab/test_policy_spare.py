"""A policy with rules of its own, carried out: a replica leaves at a step boundary, and a hot spare takes its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import eventually, needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.soak, pytest.mark.timeout(600)]

FTCTL = Path(sys.executable).with_name("ftctl")
RULES = """
version: 1
limits: {max_share: 0.34, rejoin_after_s: 1, cooldown_s: 1}
rules:
  - {name: well-again, health: [healthy], suggests: [none], action: rejoin}
  - {name: with-a-spare, codes: [xid.95], action: promote}
  - {name: at-a-boundary, codes: [xid.94], action: drain}
  - {name: rest, action: watch}
"""


@pytest.fixture
def lab(state_dir: Path) -> Iterator[Path]:
    rules = state_dir / "rules.yaml"
    rules.write_text(RULES)
    ftctl(state_dir, "lab", "up", "--spares", "1", "--gpus", "1", "--policy", "act", "--policy-file", str(rules))
    yield state_dir
    ftctl(state_dir, "lab", "down")


def ftctl(state: Path, *args: str) -> str:
    env = {**os.environ, "FTCTL_STATE_DIR": str(state)}
    done = subprocess.run(
        [str(FTCTL), *args], env=env, cwd=state, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode in (0, 1), f"ftctl {' '.join(args)}: exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def contributors(state: Path) -> list[str]:
    seen: list[str] = json.loads(ftctl(state, "status", "-o", "json"))["job"]["contributors"]
    return seen


def states(state: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in json.loads(ftctl(state, "status", "-o", "json"))["replicas"]}


def chain(state: Path, node: str) -> list[dict[str, Any]]:
    """Of the last incident of a node."""
    health = json.loads(ftctl(state, "health", node, "-o", "json"))["nodes"][0]
    incident = max(health["incidents"], key=lambda one: float(one["opened"]))["id"]
    return [json.loads(line) for line in ftctl(state, "events", "--incident", incident, "-o", "json").splitlines()]


def stays_out(state: Path, node: str, replica: str) -> list[dict[str, Any]]:
    eventually(lambda: states(state).get(replica) == "drained", f"{replica} does not leave")
    return chain(state, node)


def test_a_drain_and_a_promotion_lose_nothing_and_are_told_whole(lab: Path) -> None:
    eventually(lambda: "spare" in states(lab).values(), "no spare has caught up")
    spare = next(name for name, state in states(lab).items() if state == "spare")
    ftctl(lab, "inject", "gpu-xid", "--xid", "95", "--gpu", "0", "--node", "node1", "--duration", "60s")
    told = stays_out(lab, "node1", "r1")
    kinds = [(link["kind"], link["object"]) for link in told]
    expected = [("replica.draining", "r1"), ("replica.promoted", spare), ("replica.joined", spare)]
    assert [one for one in kinds if one in expected] == expected
    assert ("replica.drained", "r1") in kinds
    assert {link["action"] for link in told if link["kind"] == "policy.acted"} == {"promote"}
    assert spare in contributors(lab)
    ftctl(lab, "revert", "--all")
    eventually(lambda: states(lab).get("r1") == "spare", "r1 is not the new spare")
    assert len(contributors(lab)) == 3
    ftctl(lab, "inject", "gpu-xid", "--xid", "94", "--gpu", "0", "--node", "node2", "--duration", "60s")
    told = stays_out(lab, "node2", "r2")
    assert any("at-a-boundary" in link["reason"] for link in told)
    assert "r1" in contributors(lab), "the spare takes the place of whoever drains"
    lost = [line for line in ftctl(lab, "events").splitlines() if "is reduced again" in line]
    assert lost == [], "both left at a boundary"
