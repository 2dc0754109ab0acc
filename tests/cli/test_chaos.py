"""`ftctl chaos` against agents that answer as real ones: how a run ends, what is taken back, what reports say."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from agents.api import models as m
from agents.api.halt import HaltView
from ftctl.playbook.journal import read

from .conftest import AFTER, BOOK, Run
from .fake_agent import FakeCluster
from .fake_job import event
from .fake_server import refuse


def open_faults(cluster: FakeCluster) -> list[str]:
    return [f.id for agent in cluster.agents.values() for f in agent.faults if f.state is not m.FaultState.REVERTED]


def injected(cluster: FakeCluster) -> int:
    return sum(len(agent.faults) for agent in cluster.agents.values())


def records(folder: Path) -> list[dict[str, object]]:
    (directory,) = (folder / "state" / "chaos").glob("*-unplug*")
    return read(directory)


def test_a_run_injects_takes_back_and_passes(ftctl: Run, cluster: FakeCluster, book: Path, folder: Path) -> None:
    result = ftctl("chaos", "run", str(book), "-o", "json", "--junit", str(folder / "j.xml"))
    assert result.code == 0, result.err
    assert result.json()["runs"][0]["verdict"] == "passed"
    (fault,) = cluster.agents["node1"].faults
    assert (fault.kind, fault.target, fault.state) == ("link-down", "node1/rail0", m.FaultState.REVERTED)
    kinds = [record["kind"] for record in records(folder)]
    assert kinds[0] == "run"
    assert kinds.index("incident") < kinds.index("action"), "the incident is on disk before it is made"
    assert kinds[-1] == "verdict"
    suite = ET.parse(folder / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")


def test_without_a_steady_state_nothing_is_injected(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    assert cluster.job is not None
    cluster.job.set("r2", "evicted")
    result = ftctl("chaos", "run", str(book))
    assert result.code == 3
    assert "replicas.contributing is 2, replicas.contributing == 3 was expected" in result.err
    assert injected(cluster) == 0


def test_another_environment_is_refused(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    book.write_text(book.read_text().replace("[staging]", "[lab]"))
    result = ftctl("chaos", "run", str(book))
    assert result.code == 7
    assert "this cluster's environment is staging, and the playbook is for lab" in result.err
    assert injected(cluster) == 0
    assert ftctl("chaos", "plan", str(book)).code == 7


def test_a_guards_refusal_ends_the_run_and_is_told(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    book.write_text(BOOK.replace("rail: active", "nic: mgmt0"))
    result = ftctl("chaos", "run", str(book))
    assert result.code == 7
    assert "node1/mgmt0: not declared as a rail" in result.err


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        ("  - {wait: job.step == 7, timeout: 300ms}\n", 1, "job.step is 100 after 300ms, job.step == 7 was expected"),
        ("  - {steps: 5, timeout: 300ms}\n", 1, "step 105 was not reached within 300ms; the job is at step 100"),
        ("  - {command: ['false']}\n", 1, "command false: exit code 1"),
        ("  - {command: [no-such-command]}\n", 1, "command no-such-command: No such file"),
        ("  - {command: [sleep, '300'], timeout: 200ms}\n", 1, "command sleep: not done after 200ms"),
        ("  - {inject: link-down, target: {replica: r9, rail: 0}}\n", 2, "replica r9: unknown in job main"),
        (
            "  - {sleep: 5m}\nstop_if: [{expect: rails.down >= 1}]\n",
            4,
            "stop condition rails.down >= 1: rails.down is 1",
        ),
        ("  - {revert: all, at: {time: 2020-01-01T00:00:00Z}}\n", 1, "at 2020-01-01T00:00:00Z: is over: "),
        ("  - {sleep: 1200ms}\n  - {revert: all, at: {time: +0s}}\n", 1, "ago after the method began"),
        ("  - {sleep: 5m}\ntimeout: 3s\n", 1, "not done within 3s (timeout)"),
    ],
)
def test_whatever_ends_the_method_everything_is_taken_back(
    ftctl: Run, cluster: FakeCluster, book: Path, lines: str, code: int, said: str
) -> None:
    book.write_text(BOOK + lines)
    begun = time.monotonic()
    result = ftctl("chaos", "run", str(book))
    assert said in result.err
    assert result.code == (1 if code == 2 else code), "in the middle of a run, what is wrong with it is a failure"
    assert injected(cluster) == 1
    assert open_faults(cluster) == []
    assert time.monotonic() - begun < 120


def test_a_halt_ends_a_run(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    def halt() -> None:
        while not injected(cluster):
            time.sleep(0.01)
        cluster["node2"].halt = HaltView(by="ann", reason="real incident", since=time.time())

    operator = threading.Thread(target=halt, daemon=True)
    operator.start()
    book.write_text(BOOK + "  - {sleep: 5m}\n")
    begun = time.monotonic()
    result = ftctl("chaos", "run", str(book))
    assert result.code == 4
    assert "faults were halted on node2 by ann: real incident" in result.err
    assert open_faults(cluster) == []
    assert time.monotonic() - begun < 120


def test_the_steady_state_must_come_back(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    book.write_text(
        BOOK.replace("contributing == 3}", "contributing == 3}\n  - {expect: rails.down == 0, within: 300ms}")
    )
    result = ftctl("chaos", "run", str(book))
    assert result.code == 1
    assert "steady state: did not come back: rails.down is 1 after 300ms" in result.err
    assert open_faults(cluster) == []


def test_a_fault_that_stays_is_shouted_about(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    cluster.agents["node1"].revert_state = m.FaultState.STUCK
    result = ftctl("chaos", "run", str(book))
    assert result.code == 5
    assert "may still be in force" in result.err
    assert "ip link set rail0 up" in result.err, "and how to take it back by hand"


def test_ctrl_c_cleans_up_first(ftctl: Run, cluster: FakeCluster, book: Path, folder: Path) -> None:
    book.write_text(BOOK + "  - {sleep: 5m}\ncleanup:\n  - {command: [touch, " + str(folder / "swept") + "]}\n")

    def interrupt() -> None:
        while not injected(cluster):
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    result = ftctl("chaos", "run", str(book))
    thread.join()
    assert result.code == 130, result.err
    assert open_faults(cluster) == []
    assert (folder / "swept").exists()
    assert records(folder)[-1]["word"] == "interrupted"


def test_whoever_took_a_signal_before_takes_it_again(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    """A lab is removed after its last playbook: a second SIGTERM must not kill whoever does that."""
    taken: list[int] = []

    def take(number: int, _frame: object) -> None:
        taken.append(number)

    before = signal.signal(signal.SIGTERM, take)
    try:
        assert ftctl("chaos", "run", str(book)).code == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_while_the_steady_state_is_waited_for(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    book.write_text(BOOK.replace("contributing == 3}", "contributing == 9, within: 5m}"))
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    result = ftctl("chaos", "run", str(book))
    timer.join()
    assert result.code == 130
    assert time.monotonic() - begun < 200
    assert injected(cluster) == 0


def test_faults_die_with_their_controller(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    """What a killed controller cannot take back, agents do: every request carries a dead-man time."""
    seen: list[float | None] = []
    agent = cluster.agents["node1"]
    inject = agent._inject

    def noting(request: m.InjectRequest) -> m.FaultView:
        seen.append(request.dead_man_s)
        return inject(request)

    agent._inject = noting  # type: ignore[method-assign]
    assert ftctl("chaos", "run", str(book)).code == 0
    assert seen == [10.0]


def test_a_plan_asks_and_changes_nothing(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    result = ftctl("chaos", "plan", str(book), "-o", "json")
    assert result.code == 0, result.err
    lines = result.json()["plans"][0]["lines"]
    assert [(line["phase"], line["where"]) for line in lines[:2]] == [
        ("steady state", ""),
        ("method", "r1 on node1/rail0"),
    ]
    assert lines[1]["says"] == "undo: ip link set rail0 up"
    assert injected(cluster) == 0


def test_a_membership_change_is_an_incident(ftctl: Run, cluster: FakeCluster, book: Path, folder: Path) -> None:
    book.write_text(
        BOOK.split("method:", maxsplit=1)[0]
        + "method:\n  - {drain: r1}\n  - {rejoin: r1, wait: false}\n"
        + "cleanup:\n  - {ensure: replica.r1.state == contributing, timeout: 5s}\n"
    )
    assert cluster.job is not None
    cluster.job.after_rejoin = "contributing"
    result = ftctl("chaos", "run", str(book))
    assert result.code == 0, result.err
    assert [verb for _, verb, _ in cluster.job.actions] == ["drain", "rejoin"]
    assert [r["what"] for r in records(folder) if r["kind"] == "incident"] == ["drain", "rejoin"]


def test_two_controllers_of_one_user_do_not_meet(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    from ftctl.playbook.conduct import _alone

    with _alone("main"):
        result = ftctl("chaos", "run", str(book))
    assert result.code == 7
    assert "another `ftctl chaos run`" in result.err


def test_a_metric_is_a_fact_like_any_other(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    line = "  - {expect: 'metric.ftctl_nic_carrier{node=node1,nic=rail0} == 1', within: 1s}\n"
    book.write_text(book.read_text().replace("method:\n", f"{line}method:\n"))
    assert ftctl("chaos", "validate", str(book)).code == 0
    missing = ftctl("chaos", "plan", str(book))
    assert missing.code == 3
    assert "no agent has such a series" in missing.out
    cluster["node1"].metrics = 'ftctl_nic_carrier{nic="rail0",role="rail"} 1.0\n'
    assert ftctl("chaos", "plan", str(book)).code == 0
    assert ftctl("chaos", "run", str(book)).code == 0
    book.write_text(book.read_text().replace("{node=node1,nic=rail0}", "{node}"))
    wrong = ftctl("chaos", "validate", str(book))
    assert wrong.code == 2
    assert "label=value is expected" in wrong.out + wrong.err


def test_a_full_disk_under_the_journal_ends_the_run_and_everything_is_taken_back(
    ftctl: Run, cluster: FakeCluster, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full from the moment when a fault is in force."""

    def fsync(_fd: int) -> None:
        if injected(cluster):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ftctl.playbook.journal.os.fsync", fsync)
    book.write_text(BOOK + "  - {sleep: 5m}\n")
    result = ftctl("chaos", "run", str(book))
    assert result.code == 1
    assert "No space left on device: the run is ended and cleaned up" in result.err
    assert injected(cluster) == 1
    assert open_faults(cluster) == []


def test_two_faults_on_one_nic_are_refused_by_its_agent_and_the_first_is_taken_back(
    ftctl: Run, cluster: FakeCluster, book: Path
) -> None:
    agent = cluster["node1"]
    inject = agent._inject

    def one_at_a_time(request: m.InjectRequest) -> m.FaultView:
        if any(fault.target == "node1/rail0" and fault.state is m.FaultState.ACTIVE for fault in agent.faults):
            raise refuse("refused", "node1/rail0", "fault f-1 (link-down, 30 s left) is on rail0 already")
        return inject(request)

    agent._inject = one_at_a_time  # type: ignore[method-assign]
    book.write_text(BOOK + "  - {inject: link-loss, target: {node: node1, nic: rail0}, with: {percent: 5}}\n")
    result = ftctl("chaos", "run", str(book))
    assert result.code == 7
    assert "is on rail0 already" in result.err
    assert injected(cluster) == 1
    assert open_faults(cluster) == []


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
def test_clocks_of_nodes_minutes_apart_hide_nothing_and_add_nothing(
    ftctl: Run, cluster: FakeCluster, book: Path, ahead_s: float
) -> None:
    """What is of this run is known by its number, not by its time."""
    agent = cluster["node1"]
    inject = agent._inject

    def diverging(request: m.InjectRequest) -> m.FaultView:
        agent.events.append(event(3, "node1", "replica.diverged", "r1", time=time.time() + ahead_s))
        return inject(request)

    agent.events.append(event(2, "node1", "replica.diverged", "r1", time=time.time() + ahead_s))
    book.write_text(BOOK + AFTER + "objectives: {diverged: {max: 0}}\n")
    assert ftctl("chaos", "run", str(book)).code == 0, "it was there before"
    agent._inject = diverging  # type: ignore[method-assign]
    result = ftctl("chaos", "run", str(book))
    assert result.code == 1
    assert "diverged max: 1, and 0 is the limit" in result.err


def test_an_agent_of_an_older_version_says_what_it_does_not_know(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    """Neither the kind nor the dead-man time: nothing is injected without one."""
    agent = cluster["node1"]

    def older(_request: m.InjectRequest) -> m.FaultView:
        raise refuse("bad-request", "dead_man_s", "there is no such key", "the contract: GET /openapi.json")

    agent._inject = older  # type: ignore[method-assign]
    result = ftctl("chaos", "run", str(book))
    assert result.code == 1
    assert "dead_man_s: there is no such key" in result.err
    assert injected(cluster) == 0


def test_a_node_that_is_taken_out_takes_its_replica_along(
    ftctl: Run, cluster: FakeCluster, book: Path, folder: Path
) -> None:
    """Whose steps are then not those of a survivor."""
    line = "  - {inject: node-down, target: {node: node2}, duration: 30s}\n"
    book.write_text(BOOK[: BOOK.index("  - {inject")] + line)
    assert ftctl("chaos", "run", str(book)).code == 0
    (incident,) = [record for record in records(folder) if record["kind"] == "incident"]
    assert (incident["node"], incident["replica"]) == ("node2", "r2")


def test_the_breaker_halts_all_and_names_what_ends_that(ftctl: Run, cluster: FakeCluster, book: Path) -> None:
    book.write_text(
        BOOK.replace("steady_state", "breaker: {replicas_percent: 60, after: 300ms}\nsteady_state")
        + "  - {inject: proc-kill, target: {replica: r2}}\n  - {sleep: 60s}\n"
    )

    def two_are_gone() -> None:
        for name in ("r1", "r2"):
            cluster.job.replicas[name] = cluster.job.replicas[name].model_copy(update={"state": "unreachable"})

    assert cluster.job is not None
    cluster["node2"].before_inject_answer = two_are_gone
    result = ftctl("chaos", "run", str(book))
    assert result.code == 4, result.err
    assert "the breaker opened: 1 of 3 replicas contribute (33 %) for 0.3" in result.err
    assert "below 60 %; faults are halted on 3 of 3 nodes" in result.err
    assert "ftctl faults allow --reason TEXT" in result.err
    assert all(
        agent.halt is not None and "breaker of playbook unplug" in agent.halt.reason
        for agent in cluster.agents.values()
    )
    assert open_faults(cluster) == []
    again = ftctl("chaos", "run", str(book))
    assert injected(cluster) == 2, again.err
