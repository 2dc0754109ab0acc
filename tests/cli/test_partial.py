"""A request for several nodes that only some of them carry out: a state of its own, taken back or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.api import models as m

from .conftest import Run
from .fake_agent import FakeCluster

EVERYWHERE = ("inject", "link-down", "--node", "node[0-2]", "--nic", "rail1", "--duration", "30s")


@pytest.fixture
def half(cluster: FakeCluster) -> FakeCluster:
    """On node1 that rail is down already, which the agent refuses."""
    cluster["node1"].nics = [n.model_copy(update={"up": n.name != "rail1"}) for n in cluster["node1"].nics]
    return cluster


def states(cluster: FakeCluster) -> dict[str, list[str]]:
    return {name: [fault.state.value for fault in agent.faults] for name, agent in cluster.agents.items()}


def test_it_is_taken_back_where_it_was_made(ftctl: Run, half: FakeCluster) -> None:
    result = ftctl(*EVERYWHERE)
    assert result.code == 8
    assert "error: node1/rail1: it is down already" in result.err
    assert result.err.endswith("partial: injected and taken back on node[0,2]; not on node1\n")
    assert "take it back earlier" not in result.err
    assert states(half) == {"node0": ["reverted"], "node1": [], "node2": ["reverted"]}


def test_or_kept_and_named(ftctl: Run, half: FakeCluster) -> None:
    result = ftctl(*EVERYWHERE, "--on-partial", "keep")
    assert result.code == 8
    ids = [half[name].faults[0].id for name in ("node0", "node2")]
    assert f"partial: injected on node[0,2]; not on node1; ftctl revert {' '.join(ids)} takes it back" in result.err
    assert states(half) == {"node0": ["active"], "node1": [], "node2": ["active"]}


@pytest.mark.parametrize(("choice", "fate"), [("revert", "taken back"), ("keep", "injected")])
def test_as_a_document(ftctl: Run, half: FakeCluster, choice: str, fate: str) -> None:
    document = ftctl(*EVERYWHERE, "--on-partial", choice, "-o", "json").json()
    assert document["outcome"] == "partial"
    assert document["nodes"] == {"node0": fate, "node2": fate, "node1": "not injected"}
    assert len(document["faults" if choice == "keep" else "taken_back"]) == 2
    assert len(document["errors"]) == 1


def test_all_or_none_are_no_half(ftctl: Run, half: FakeCluster) -> None:
    every = ftctl("inject", "noop", "--node", "node[0-2]", "-o", "json")
    assert (every.code, every.json()["outcome"]) == (0, "all")
    none = ftctl("inject", "link-down", "--node", "node1", "--nic", "rail1", "-o", "json")
    assert (none.code, none.json()["outcome"], none.json()["nodes"]) == (7, "none", {"node1": "not injected"})
    dry = ftctl(*EVERYWHERE, "--dry-run", "-o", "json")
    assert (dry.code, dry.json()["outcome"], dry.json()["nodes"]["node0"]) == (7, "partial", "dry run")
    assert states(half)["node0"] == ["active"], "only what was injected before"


def test_what_cannot_be_taken_back_is_more_urgent_than_the_half(
    ftctl: Run, half: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    half["node2"].revert_state = m.FaultState.STUCK
    result = ftctl(*EVERYWHERE)
    assert result.code == 5
    assert "by hand on node2: ip link set rail0 up" in result.err.replace("rail1 up", "rail0 up")
    assert "injected on node2; injected and taken back on node0; not on node1" in result.err
    half["node0"].stop()
    agent = half["node2"]
    plain = agent.fault
    monkeypatch.setattr(
        agent, "fault", lambda target, wish: plain(target, wish, irreversible=True, state=m.FaultState.DONE)
    )
    dead = ftctl("inject", "proc-kill", "--replica", "r2", "--node", "node[0,2]")
    assert dead.code == 8
    assert "cannot be taken back: f-node2-" in dead.err


BOOK = """\
version: 1
name: both
environments: [staging]
steady_state: [{expect: replicas.contributing == 3}]
method:
  - parallel:
      - {inject: link-down, target: {node: node0, nic: rail1}}
      - {inject: link-down, target: {node: node1, nic: rail1}}
"""


def test_actions_of_a_playbook_that_go_together(
    ftctl: Run, half: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCTL_STATE_DIR", str(tmp_path / "state"))
    half.inventory.write_text(half.inventory.read_text() + "environment: staging\n")
    (tmp_path / "both.yaml").write_text(BOOK)
    result = ftctl("chaos", "run", str(tmp_path / "both.yaml"))
    assert result.code == 7
    assert "it is down already (partial: done at the same time: inject link-down for 1m)" in result.err
    assert states(half) == {"node0": ["reverted"], "node1": [], "node2": []}
