"""Faults on whole nodes, on the agent and on the coordinator: what is bounded, what is left alone, what comes back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_links import FakeClock, FakeLinks
from live_agent import live_agent, until

from agents.api.faultspecs import NOT_OFFERED, SPECS, ParamValue
from agents.faults import __main__ as catalog_page
from agents.faults.catalog import CATALOG
from agents.faults.contract import Params, Refusal, Target
from agents.host import coordinators, memory
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.processes import start_time_of
from agents.injection.guard import Limits, check_params
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Ledger
from agents.injection.problems import FaultProblem
from agents.injection.reverting import Reverter
from agents.injection.watchdog import Watchdog

NODE = Target("node1")
LIMITS = Limits("node1", ("rail0", "rail1"), "mgmt0", max_faults=5, max_duration_s=900)


def params_of(kind: str, **given: ParamValue) -> Params:
    params = check_params(CATALOG[kind].params, given)
    assert not isinstance(params, Refusal), params
    return params


def injector_over(machine: Machine, directory: Path) -> Injector:
    ledger = Ledger(directory)
    reverter = Reverter(ledger, machine, sleep=lambda _s: None)
    injector = Injector(ledger, machine, LIMITS, lambda *_e: None, reverter=reverter)
    injector.start()
    return injector


def test_memory_is_held_for_real_and_never_more_than_leaves_what_must_be_left(machine: Machine) -> None:
    fault = CATALOG["mem-hog"]
    too_much = fault.check(machine, NODE, params_of("mem-hog", mb=memory.available_mb()))
    assert too_much is not None
    assert "would be left" in too_much.reason
    record = fault.plan(machine, NODE, params_of("mem-hog", mb=70))
    fault.inject(machine, record)
    try:
        (pid, _start, mb) = memory.holders(record.token)[0]
        assert 70 <= mb < 110
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    finally:
        fault.undo(machine, record)
    assert memory.holders(record.token) == []
    record = fault.plan(machine, NODE, params_of("mem-hog", mb=1, leave_mb=90_000_000))
    with pytest.raises(HostError, match="only 0 MB could be taken"):
        fault.inject(machine, record)
    fault.undo(machine, record)
    assert fault.probe(machine, record).in_force is False


def test_a_disk_is_filled_up_to_what_must_stay_free(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With free space as it would be on a disk that has 40 MB more than what the file takes."""
    from agents.faults import disk_full

    def free_mb(_path: Path) -> int:
        taken = sum(file.stat().st_blocks * 512 >> 20 for file in machine.scratch.glob("fill-*"))
        return 40 - taken

    monkeypatch.setattr(disk_full, "_free_mb", free_mb)
    fault = CATALOG["disk-full"]
    refusal = fault.check(machine, NODE, params_of("disk-full"))
    assert refusal is not None
    assert "40 MB are free" in refusal.reason
    params = params_of("disk-full", leave_mb=10)
    assert fault.check(machine, NODE, params) is None
    record = fault.plan(machine, NODE, params)
    fault.inject(machine, record)
    assert 8 <= free_mb(tmp_path) <= 10
    assert "are free" in fault.probe(machine, record).sentence
    fault.undo(machine, record)
    assert free_mb(tmp_path) == 40


def test_a_node_that_is_down_starts_nothing_and_has_no_other_fault(
    machine: Machine, links: FakeLinks, clock: FakeClock, ledger_directory: Path
) -> None:
    injector = injector_over(machine, ledger_directory)
    first = injector.inject(Injection("link-loss", "ann", 30.0, nic="rail0", params={"percent": 1.0}))
    with pytest.raises(FaultProblem, match=first.id):
        injector.inject(Injection("node-down", "ann", 30.0))
    injector.revert(first.id, "by ann")
    assert not injector.holds_node()
    entry = injector.inject(Injection("node-down", "ann", 30.0))
    assert [links.devices[i].up for i in (2, 3, 4)] == [False, False, True], "the management NIC stays"
    assert injector.holds_node()
    with pytest.raises(FaultProblem, match=entry.id):
        injector.inject(Injection("link-loss", "ann", 30.0, nic="rail0", params={"percent": 1.0}))
    clock.boot += 31
    assert Watchdog(Ledger(ledger_directory), machine).look(agent_lives=False) == 0
    assert [links.devices[i].up for i in (2, 3, 4)] == [True, True, True]
    injector.refresh()
    assert not injector.holds_node(), "what the watchdog took back holds nothing"


def test_a_coordinator_is_believed_only_where_it_is(machine: Machine) -> None:
    started = time.time()
    pretends = [sys.executable, "-c", "import time; time.sleep(600)", "ftar_core.coordinator"]
    children = [subprocess.Popen(pretends), subprocess.Popen(["sleep", "600"])]
    try:
        found = coordinators.process_of(children[0].pid, started)
        assert (found.pid, found.start_time) == (children[0].pid, start_time_of(children[0].pid))
        for pid, age in ((children[1].pid, started), (children[0].pid, started - 3600), (2**22 - 1, started)):
            with pytest.raises(HostError):
                coordinators.process_of(pid, age)
    finally:
        for child in children:
            child.kill()
            child.wait()
    refusal = CATALOG["coordinator-kill"].check(machine, NODE, {})
    assert refusal is not None
    assert "no coordinator is known here" in refusal.reason


def test_a_killed_agent_answers_first_and_its_watchdog_reverts_the_others() -> None:
    with live_agent() as agent:
        agent.start("--allow-faults")
        begun = time.monotonic()
        other = agent.inject(kind="noop", duration_s=3)
        marker = Path(other["undo"][0].split()[1])
        assert marker.exists() or time.monotonic() > begun + 3
        killed = agent.inject(kind="agent-kill")
        assert (killed["state"], killed["irreversible"]) == ("done", True)
        assert agent.process is not None
        assert agent.process.wait(60) == -9
        until(lambda: not marker.exists(), "the watchdog takes back what is due")


def test_the_page_of_all_faults_is_up_to_date() -> None:
    assert catalog_page.PAGE.read_text(encoding="utf-8") == catalog_page.page(), "python -m agents.faults"
    assert not set(NOT_OFFERED) & set(SPECS)


def test_specs_hold_together() -> None:
    common = {"node", "nic", "rail", "replica", "rank", "duration", "reason", "dry_run", "param", "output", "lab"}
    for spec in SPECS.values():
        names = [param.name for param in spec.params]
        assert len(set(names)) == len(names)
        assert not common & set(names), "options of every fault"
        assert not spec.summary.endswith(".")
        for param in spec.params:
            defaults = {param.name: param.default} if param.default is not None else {}
            assert not isinstance(check_params((param,), defaults), Refusal) or param.default is None
    assert dataclasses.is_dataclass(next(iter(SPECS.values())))
    assert os.path.basename(catalog_page.PAGE) == "CATALOG.md"
