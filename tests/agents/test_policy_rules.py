"""Policies: files that cannot be used are named by line; decisions by given histories."""

from __future__ import annotations

import pytest

from agents.api.policyfile import PolicyProblem, parse, read
from agents.health.xidtable import read as read_xids
from agents.policy.__main__ import PAGE, page
from agents.policy.engine import Decision, Finding, Fleet, Past, decide

NIC = Finding("node1/rail0", "nic", "unhealthy", "nic.carrier", incident="i1")
LOST = Finding("node1/gpu 3", "gpu", "unhealthy", "xid.79", "evict", "i2")


def ask(
    finding: Finding, past: Past = Past(), fleet: Fleet = Fleet(4), mode: str = "act", now: float = 1000.0
) -> Decision:
    return decide(read(), mode, finding, past, fleet, now=now)


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page()


def test_first_network_fault_is_tolerated_the_second_in_five_minutes_is_not() -> None:
    assert ask(NIC).action == "watch"
    assert ask(NIC, Past([(699.0, NIC)])).action == "watch"
    second = ask(NIC, Past([(701.0, NIC)]))
    assert (second.action, second.perform, second.incident) == ("drain", True, "i1")


def test_xids() -> None:
    fault = Finding("node1/gpu 3", "gpu", "degraded", "xid.31", "restart")
    assert ask(LOST).action == "evict"
    assert ask(fault).action == "restart"
    assert ask(fault, Past([(1.0, fault)])).action == "evict"
    assert ask(Finding("node1/gpu 3", "gpu", "degraded", "xid.63", "watch")).action == "watch"
    assert ask(Finding("node1/gpu 3", "gpu", "healthy")).action == "rejoin"


@pytest.mark.parametrize("mode", ["observe", "recommend"])
def test_other_modes_decide_and_do_nothing(mode: str) -> None:
    assert (ask(LOST, mode=mode).action, ask(LOST, mode=mode).perform) == ("evict", False)


def test_what_holds_an_act_back_is_said() -> None:
    loop = Past(acts=[(t, LOST.object, "evict") for t in (100.0, 400.0, 700.0)])
    for decision, word in (
        (ask(LOST, loop), "breaker"),
        (ask(Finding(LOST.object, "gpu", "healthy"), loop), "breaker"),
        (ask(LOST, Past(acts=[(990.0, LOST.object, "evict")])), "cools down"),
        (ask(LOST, fleet=Fleet(4, 1)), "out already"),
        (ask(LOST, fleet=Fleet(4, present=False)), "gone"),
    ):
        assert word in decision.reason
        assert not decision.perform


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version: 1\nrulez: []", "policy:2: unknown key 'rulez'"),
        ("version: 1\nrules:\n- {name: a, action: watch, x: 1}", "policy:3: unknown key 'x'"),
        (
            "version: 1\nrules:\n- {name: a, action: watch}\n- {name: b, action: evict}",
            "rule b contradicts a on line 3",
        ),
        ("version: 1\nrules:\n- {name: a, action: watch}\n- {name: b, action: watch}", "policy:4: rule b overlaps a"),
        ("version: 1\nrules:\n- {name: a, action: fly}", "policy:3: action 'fly'"),
        ("version: 1\nlimits: {max_share: .nan}\nrules:\n- {name: a, action: watch}", "max_share must be"),
        ("version: 1\nrules:\n- {name: a, action: watch, hook: [sinfo]}", "whole path of a program, not 'sinfo'"),
        ("version: 1\nrules:\n- {name: a, action: watch, cordon: true}", "cordon must be true or false, and goes with"),
        ("version: 1\nrules:\n- {name: a, action: evict, timeout_s: 5}", "timeout_s belongs to a hook"),
        (
            "version: 1\nrules:\n- {name: a, action: evict, hook: [/bin/x], timeout_s: 1e9}",
            "timeout_s must be a number",
        ),
        ("a: [", "not YAML"),
        ("", "a mapping"),
    ],
)
def test_bad_files(text: str, problem: str) -> None:
    with pytest.raises(PolicyProblem) as caught:
        parse(text)
    assert problem in str(caught.value)


def test_the_page_says_what_is_decided_about_every_xid() -> None:
    rows = {cells[1].strip(): cells for line in page().splitlines() if len(cells := line.split("|")) == 8}
    assert {str(code) for code in read_xids().rows} <= set(rows)
    decided = {code: rows[code][5].strip() for code in ("31", "63", "79", "95")}
    assert decided == {"31": "restart", "63": "watch", "79": "evict and cordon", "95": "evict"}
    assert rows["31"][6].strip().endswith("evict")


def test_rdma_ports_are_a_network_too() -> None:
    port = Finding("node1/rdma mlx5_0/1", "rdma", "unhealthy", "rdma.down")
    assert ask(port).action == "watch"
    assert ask(port, Past([(800.0, port)])).action == "drain"
