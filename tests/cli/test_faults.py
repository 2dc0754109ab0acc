"""inject, faults, revert: what is injected is known, and taken back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agents.api import models as m
from agents.api.faultspecs import SPECS
from ftctl.client import injection

from .conftest import Run
from .fake_agent import FakeCluster


def test_link_down_from_inject_to_revert(ftctl: Run, cluster: FakeCluster) -> None:
    result = ftctl("inject", "link-down", "--node", "node1", "--nic", "rail0", "--duration", "20s", "--reason", "drill")
    assert result.code == 0
    assert "node1/rail0" in result.out
    assert "active" in result.out
    assert "ftctl revert f-node1-0" in result.err
    listed = ftctl("faults")
    assert listed.code == 0
    assert "drill" in listed.out
    assert ftctl("revert", "f-node1-0").code == 0
    assert ftctl("faults").err == "no faults\n"
    assert "reverted" in ftctl("faults", "--all").out


def test_a_rail_by_number_on_several_nodes(ftctl: Run, cluster: FakeCluster) -> None:
    result = ftctl("inject", "link-down", "--node", "node[0-1]", "--rail", "1", "-o", "json")
    assert result.code == 0
    assert {f["target"] for f in result.json()["faults"]} == {"node0/rail1", "node1/rail1"}
    assert cluster["node2"].faults == []
    reverted = ftctl("revert", "--all", "-o", "json")
    assert reverted.code == 0
    assert [f["state"] for f in reverted.json()["faults"]] == ["reverted", "reverted"]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("noop", "--node", "node9"), 2, "node node9: not in the inventory"),
        (("noop", "--node", "node[0-"), 2, "bracket"),
        (("noop",), 2, "--node"),
        (("noop", "--node", "node0", "--duration", "0s"), 2, "longer than nothing"),
        (("noop", "--node", "node0", "--duration", "20"), 2, "not a duration"),
        (("noop", "--node", "node0", "--duration", "16m"), 2, "960 s is not in"),
        (("link-down", "--node", "node0"), 2, "either --nic NAME or --rail K"),
        (("link-down", "--node", "node0", "--nic", "rail0", "--rail", "0"), 2, "either --nic NAME or --rail K"),
        (("link-down", "--node", "node0", "--nic", "rail7"), 2, "node0/rail7: no such network device"),
        (("link-down", "--node", "node0", "--rail", "7"), 2, "rail 7 of node0: unknown (it has rails 0 to 1"),
        (("link-down", "--node", "node0", "--nic", "mgmt0"), 7, "not declared as a rail"),
        (("gpu-melt", "--node", "node0"), 2, "gpu-melt"),
        ((), 2, "Usage: ftctl inject"),
    ],
)
def test_bad_input_is_one_clear_line_and_injects_nothing(
    ftctl: Run, cluster: FakeCluster, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    result = ftctl("inject", *arguments)
    assert result.code == code
    assert expected in result.err
    assert "Traceback" not in result.err
    assert all(agent.faults == [] for agent in cluster.agents.values())


def test_a_second_link_down_on_the_same_rail_is_refused(ftctl: Run) -> None:
    assert ftctl("inject", "link-down", "--node", "node0", "--nic", "rail0").code == 0
    result = ftctl("inject", "link-down", "--node", "node0", "--nic", "rail0")
    assert result.code == 7
    assert "down already" in result.err


def test_a_dead_agent_injects_nothing_and_says_so(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node1"].stop()
    result = ftctl("inject", "noop", "--node", "node1")
    assert result.code == 6
    assert "nobody listens on" in result.err


def test_a_dry_run_injects_nothing(ftctl: Run, cluster: FakeCluster) -> None:
    result = ftctl("inject", "link-down", "--node", "node0", "--nic", "rail0", "--dry-run")
    assert result.code == 0
    assert result.err.startswith("dry run: link-down on node0/rail0 would be injected for 1m")
    assert cluster["node0"].faults == []


def test_a_lost_answer_is_cleared_up_by_the_request_id(ftctl: Run, cluster: FakeCluster) -> None:
    """The agent injected and then dropped the connection: the fault is in force, and ftctl finds that out."""
    agent = cluster["node0"]

    def drop() -> None:
        raise BrokenPipeError

    agent.before_inject_answer = drop
    result = ftctl("inject", "noop", "--node", "node0", "-o", "json")
    assert result.code == 0
    assert [f["id"] for f in result.json()["faults"]] == ["f-node0-0"]


def test_a_request_that_vanished_is_known_not_to_be_in_force(ftctl: Run, cluster: FakeCluster) -> None:
    agent = cluster["node0"]

    def vanish() -> None:
        agent.faults.clear()
        raise BrokenPipeError

    agent.before_inject_answer = vanish
    result = ftctl("inject", "noop", "--node", "node0")
    assert result.code == 1
    assert "nothing was injected" in result.err
    assert len(agent.cancelled) == 1  # should the request still arrive, the agent refuses it


def test_an_agent_that_dies_while_injecting_leaves_a_doubt_with_exit_code_5(
    ftctl: Run, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injection, "LOOK_FOR_S", 0.5)
    agent = cluster["node0"]

    def die() -> None:
        threading.Thread(target=agent.stop).start()
        time.sleep(0.1)
        raise BrokenPipeError

    agent.before_inject_answer = die
    result = ftctl("inject", "noop", "--node", "node0")
    assert result.code == 5
    assert "may be in force" in result.err
    assert "ftctl revert --all --node node0" in result.err


def test_revert_of_what_is_not_there_or_not_said(ftctl: Run, cluster: FakeCluster) -> None:
    assert ftctl("revert").code == 2
    assert ftctl("revert", "f-1", "--all").code == 2
    unknown = ftctl("revert", "f-1")
    assert unknown.code == 2
    assert "fault f-1: unknown on every node" in unknown.err
    cluster["node2"].stop()
    silent = ftctl("revert", "f-1")
    assert silent.code == 6
    assert "no answer from node2" in silent.err
    assert ftctl("revert", "--all", "--node", "node[0-1]").err == "no faults to revert\n"


def test_a_revert_that_gets_stuck_ends_with_5_and_the_command_by_hand(ftctl: Run, cluster: FakeCluster) -> None:
    ftctl("inject", "link-down", "--node", "node0", "--nic", "rail0")
    cluster["node0"].revert_state = m.FaultState.STUCK
    cluster["node1"].stop()  # 5 is more urgent than 6
    result = ftctl("revert", "--all")
    assert result.code == 5
    assert "may still be in force" in result.err
    assert "ip link set rail0 up" in result.err


def test_the_catalogue_comes_from_the_agents(ftctl: Run) -> None:
    result = ftctl("inject", "--list")
    assert result.code == 0
    assert "link-down" in result.out
    assert ftctl("inject", "--list", "-o", "json").json()["kinds"][0]["kind"] == "noop"


def test_a_kind_that_only_the_agents_know_is_injected_with_parameters_by_name(ftctl: Run, cluster: FakeCluster) -> None:
    flare = ("inject", "solar-flare", "--node", "node1", "--param", "strength=2")
    assert ftctl(*flare, "--param", "aurora=true").code == 0
    assert [f.params for f in cluster["node1"].faults] == [{"strength": 2.0, "aurora": True}]
    for more, words in (
        (("--param", "colour=red"), "parameters of solar-flare: strength, aurora"),
        (("--param", "aurora=perhaps"), "'perhaps' is no bool"),
        (("--param", "strength"), "NAME=VALUE is expected"),
    ):
        result = ftctl(*flare, *more)
        assert (result.code, words in result.err) == (2, True), result.err
    nowhere = ftctl("inject", "solar-flare")
    assert (nowhere.code, "--node NODES" in nowhere.err) == (2, True)
    typo = ftctl("inject", "solar-flair", "--node", "node0")
    assert (typo.code, "ftctl inject solar-flare --help" in typo.err) == (2, True)
    assert len(cluster["node1"].faults) == 1


def test_nodes_become_the_addresses_of_their_rails_and_a_replica_its_nodes(ftctl: Run, cluster: FakeCluster) -> None:
    assert ftctl("inject", "partition", "--node", "node0", "--peers", "node[1-2]").code == 0
    (fault,) = cluster["node0"].faults
    peers = str(fault.params["peers"]).split(",")
    assert set(peers) == {a.partition("/")[0] for n in cluster["node1"].nics if n.role == "rail" for a in n.addresses}
    assert ftctl("inject", "partition", "--node", "node0", "--peers", "node9").code == 2
    assert ftctl("inject", "partition", "--node", "node0", "--peers", "10.9.0.1").code == 0
    assert cluster["node0"].faults[1].params["peers"] == "10.9.0.1"
    assert ftctl("inject", "proc-hang", "--replica", "r1", "--rank", "0").code == 0
    assert [f.kind for f in cluster["node1"].faults] == ["proc-hang"]
    unknown = ftctl("inject", "proc-hang", "--replica", "r9")
    assert (unknown.code, "replica r9: no node has a process of it" in unknown.err) == (2, True)
    skewed = ftctl("inject", "clock-skew", "--node", "node0")
    assert (skewed.code, "not offered" in skewed.err) == (2, True)


def test_every_published_kind_is_a_command_with_its_parameters(bare: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert bare("inject", "--help").code == 0
    overview = capsys.readouterr().out
    for spec in SPECS.values():
        assert spec.kind in overview
        assert bare("inject", spec.kind, "--help").code == 0
        shown = capsys.readouterr().out
        assert all(param.option in shown for param in spec.params)
        assert ("--duration" in shown) is not spec.irreversible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_the_agent_injects_takes_the_fault_back(cluster: FakeCluster, number: signal.Signals) -> None:
    """The signal comes after the agent has injected and before it has answered: the worst moment."""
    agent = cluster["node0"]
    injected, answer = threading.Event(), threading.Event()

    def slow() -> None:
        injected.set()
        answer.wait(90)

    agent.before_inject_answer = slow
    child = _start(cluster.inventory, "inject", "link-down", "--node", "node0", "--nic", "rail0")
    try:
        assert injected.wait(90)
        child.send_signal(number)
        time.sleep(0.2)
        answer.set()
        _, err = child.communicate(timeout=90)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert "1 reverted, nothing is left" in err
    assert [f.state for f in agent.faults] == [m.FaultState.REVERTED]


def test_ctrl_c_with_an_agent_that_dies_names_the_doubt(cluster: FakeCluster) -> None:
    agent = cluster["node0"]
    injected, go_on = threading.Event(), threading.Event()

    def die() -> None:
        injected.set()
        go_on.wait(90)
        threading.Thread(target=agent.stop).start()
        time.sleep(0.1)
        raise BrokenPipeError

    agent.before_inject_answer = die
    child = _start(cluster.inventory, "inject", "noop", "--node", "node0")
    try:
        assert injected.wait(90)
        child.send_signal(signal.SIGINT)
        go_on.set()
        _, err = child.communicate(timeout=90)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 5
    assert "ftctl revert --all --node node0" in err


def _start(inventory: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from ftctl.app import main; sys.exit(main())", *args],
        env={**os.environ, "FTCTL_INVENTORY": str(inventory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reason_does_not_rewrite_the_terminal_of_who_reads_it(ftctl: Run, cluster: FakeCluster) -> None:
    """An escape sequence, a carriage return and a turned direction of writing, by another user's hand."""
    evil = "x\x1b[2J\x1b[31mall is well\rnode1 \x9b2K\u202ellaf\x07"
    made = ftctl("inject", "link-down", "--node", "node1", "--nic", "rail0", "--reason", evil)
    assert made.code == 0
    for result in (
        made,
        ftctl("faults"),
        ftctl("why", "fault", "f-node1-0"),
        ftctl("status"),
        ftctl("revert", "--all"),
    ):
        said = result.out + result.err
        assert not set("\x1b\r\x9b\x07\u202e") & set(said), ascii(said)
    assert "all is well" in made.out
    assert evil in ftctl("faults", "--all", "-o", "json").json()["faults"][0]["reason"], "data is what it is"
