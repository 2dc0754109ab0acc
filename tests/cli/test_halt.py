"""faults halt and allow: on all nodes at once, and what was not reached is said."""

from __future__ import annotations

import pytest

from agents.api import models as m

from .conftest import Run
from .fake_agent import FakeCluster


def test_halt_takes_all_back_refuses_new_ones_and_is_shown(ftctl: Run, cluster: FakeCluster) -> None:
    assert ftctl("inject", "noop", "--node", "node[0-1]").code == 0
    done = ftctl("faults", "halt", "--reason", "real incident")
    assert done.code == 0, done.err
    assert done.out.count("reverted") == 2
    assert "faults are halted on 3 of 3 nodes\n" in done.err
    assert ftctl("faults").err == "no faults\n"
    again = ftctl("faults", "halt", "--reason", "me too")
    assert again.code == 0
    assert "(3 of them before already)" in again.err
    refused = ftctl("inject", "noop", "--node", "node1")
    assert refused.code == 7
    assert "halted on node1 by operator: real incident" in refused.err
    assert "next:  ftctl faults allow --reason TEXT" in refused.err
    status = ftctl("status")
    assert status.code == 0
    assert "faults: halted by operator " in status.out
    assert "on all 3 nodes: real incident; none is injected" in status.out
    assert ftctl("status", "-o", "json").json()["nodes"][0]["halt"]["reason"] == "real incident"
    assert ftctl("faults", "allow", "--reason", "over", "--node", "node1", "-o", "json").json()["nodes"] == [
        {"name": "node1", "changed": True, "halt": None, "error": ""}
    ]
    assert ftctl("inject", "noop", "--node", "node1").code == 0
    assert "on node0, node2: real incident" in ftctl("status").out
    assert ftctl("faults", "allow", "--reason", "over").code == 0


def test_nodes_that_were_not_reached_are_listed(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node1"].stop()
    done = ftctl("faults", "halt", "--reason", "incident")
    assert done.code == 6
    assert "faults are halted on 2 of 3 nodes" in done.err
    assert "not halted on node1, as far as is known: agent of node1" in done.err
    assert "ftctl faults halt --node node1 --reason TEXT" in done.err


def test_a_fault_that_stays_counts_more_than_a_silent_agent(ftctl: Run, cluster: FakeCluster) -> None:
    assert ftctl("inject", "noop", "--node", "node0").code == 0
    cluster["node0"].revert_state = m.FaultState.STUCK
    cluster["node1"].stop()
    assert ftctl("faults", "halt", "--reason", "incident").code == 5


@pytest.mark.parametrize(
    "words",
    [
        ("halt",),
        ("halt", "--reason", " "),
        ("allow",),
        ("halt", "--reason", "x", "--node", "node9"),
        ("halt", "--reason", "x", "--node", "node[0-"),
        ("--all", "halt", "--reason", "x"),
        ("-o", "json", "halt", "--reason", "x"),
        ("hold", "--reason", "x"),
    ],
)
def test_what_cannot_be_meant_changes_nothing(ftctl: Run, cluster: FakeCluster, words: tuple[str, ...]) -> None:
    wrong = ftctl("faults", *words)
    assert wrong.code == 2, wrong.err
    assert wrong.err.startswith("error: ")
    assert all(agent.halt is None for agent in cluster.agents.values())
