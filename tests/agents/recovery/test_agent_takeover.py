"""Agents and fork servers that are killed: replicas go on, nothing is forgotten, nothing runs twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.host import processes
from agents.host.processes import Handle, kill_session, start_time_of
from agents.recovery.records import Exit, Life, read_record, write_record

from .conftest import AgentProcess, Node, alive, processes_of, wait_for


def running(agent: AgentProcess, name: str) -> int:
    def check() -> int | None:
        view = agent.views()[name]
        return view.pid if view.state == "running" else None

    pid = wait_for(check, f"{name} to run")
    assert isinstance(pid, int)
    return pid


def test_replicas_outlive_a_killed_agent_and_the_next_one_adopts_them(node: Node, tmp_path: Path) -> None:
    what = tmp_path / "what"
    what.write_text("sleep", encoding="ascii")
    node.replica("r1", "sleep")
    node.replica("r2", "exit-from-file", str(what))
    node.replica("r3", "polite", "76")
    agent = node.agent()
    pids = {name: running(agent, name) for name in ("r1", "r2", "r3")}
    wait_for(lambda: "listening" in node.log("r3"))
    agent.kill()
    assert all(alive(pid) for pid in pids.values())
    os.kill(pids["r2"], signal.SIGKILL)  # these end while nobody looks
    os.kill(pids["r3"], signal.SIGTERM)
    wait_for(lambda: not alive(pids["r2"]) and not alive(pids["r3"]))
    node.start()
    adopted = node.until("r1", "running")
    assert adopted.pid == pids["r1"]
    assert adopted.restarts == 0
    assert "earlier agent" in node.said("replica.adopted", "r1")[0]
    assert node.until("r3", "stopped").exit_code == 76
    node.until("r2", "running", restarts=1)
    assert "killed by SIGKILL" in node.said("replica.exited", "r2")[0]
    assert len({node.server_pid(name) for name in pids}) == 1, "the fork server was kept"
    os.kill(pids["r1"], signal.SIGKILL)
    node.until("r1", "running", restarts=1)
    assert "killed by SIGKILL" in node.said("replica.exited", "r1")[0]


def test_an_operators_stop_survives_the_agent(node: Node) -> None:
    node.replica("r1", "sleep")
    node.replica("r2", "sleep")
    agent = node.agent()
    pid = running(agent, "r1")
    running(agent, "r2")
    assert agent.tell("stop_replica r1") == "done"
    agent.kill()  # perhaps before the process ended
    node.start()
    node.until("r1", "stopped")
    assert not alive(pid)
    node.until("r2", "running")
    assert not node.said("replica.started", "r1")


def test_replicas_outlive_a_killed_fork_server(node: Node) -> None:
    node.replica("r1", "sleep")
    node.replica("r2", "sleep")
    node.start()
    first = node.until("r1", "running")
    second = node.until("r2", "running")
    server = node.server_pid("r1")
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: node.said("forkserver.lost"))
    assert first.pid is not None
    assert second.pid is not None
    assert node.view("r1").pid == first.pid
    os.kill(first.pid, signal.SIGKILL)
    again = node.until("r1", "running", restarts=1)
    assert again.pid != first.pid
    assert "not known" in node.said("replica.exited", "r1")[0]
    assert node.server_pid("r1") != server
    assert node.view("r2").pid == second.pid


def test_both_killed_at_once(node: Node) -> None:
    node.replica("r1", "sleep")
    node.replica("r2", "sleep")
    agent = node.agent()
    pids = [running(agent, name) for name in ("r1", "r2")]
    os.kill(node.server_pid("r1"), signal.SIGKILL)
    agent.kill()
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: not alive(pids[1]))
    node.start()
    assert node.until("r1", "running").pid == pids[0]
    node.until("r2", "running", other_than=pids[1])
    assert "not known" in node.said("replica.exited", "r2")[0]


def test_a_hung_fork_server_is_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.recovery.forkclient.ANSWER_DEADLINE_S", 0.3)
    node.replica("r1", "sleep")
    node.replica("r2", "sleep", autostart=False)
    supervisor = node.start()
    first = node.until("r1", "running")
    server = node.server_pid("r1")
    os.kill(server, signal.SIGSTOP)
    supervisor.start_replica("r2")
    node.until("r2", "running")
    assert node.server_pid("r2") != server
    assert not alive(server)
    assert node.view("r1").pid == first.pid
    assert len(processes_of(node.state)) == 3, "a fork server and one process a replica"


def test_other_imports_mean_another_fork_server_and_the_old_one_keeps_its_child(node: Node) -> None:
    node.replica("r1", "polite", "76")
    agent = node.agent()
    pid = running(agent, "r1")
    wait_for(lambda: "listening" in node.log("r1"))
    server = node.server_pid("r1")
    agent.close("keep")
    assert alive(pid)
    node.preload = ["sample_replica", "json"]
    node.replica("r2", "sleep")
    node.start()
    assert node.until("r1", "running").pid == pid
    node.until("r2", "running")
    assert node.server_pid("r2") != server
    os.kill(pid, signal.SIGTERM)
    assert node.until("r1", "stopped").exit_code == 76, "the old server wrote it down"
    wait_for(lambda: not alive(server), "the retired server to end after its last child")


def test_a_changed_configuration_is_applied_at_the_next_start(node: Node) -> None:
    node.replica("r1", "sleep")
    node.replica("r2", "exit", "2")
    agent = node.agent()
    pid = running(agent, "r1")
    wait_for(lambda: agent.views()["r2"].state == "failed")
    agent.close("keep")
    node.replicas = []
    node.replica("r1", "exit", "76")
    node.replica("r2", "sleep")
    supervisor = node.start()
    assert node.until("r1", "running").pid == pid
    assert "configuration changed" in node.view("r1").reason
    node.until("r2", "running")  # the failure was the old configuration's
    supervisor.restart_replica("r1", "apply it")
    assert node.until("r1", "stopped").exit_code == 76


def test_a_failed_replica_stays_failed_for_the_next_agent(node: Node) -> None:
    node.replica("r1", "exit", "77")
    agent = node.agent()
    wait_for(lambda: agent.views()["r1"].state == "failed")
    agent.kill()
    node.start()
    view = node.until("r1", "failed")
    assert view.exit_code == 77
    assert "refused by the job" in view.reason
    assert not node.said("replica.started")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else that has the number of a replica's process of before."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait(60)


@pytest.mark.parametrize("why", ["the numbers went round", "the machine was started again"])
def test_a_pid_that_went_to_a_stranger_is_neither_adopted_nor_killed(
    node: Node, stranger: subprocess.Popen[bytes], why: str
) -> None:
    node.replica("r1", "sleep")
    directory = node.path("r1")
    directory.mkdir(parents=True)
    start = start_time_of(stranger.pid)
    assert start is not None
    other_boot = why == "the machine was started again"
    life = Life(
        life=7,
        pid=stranger.pid,
        start_time=start if other_boot else start - 1,
        boot_id="another" if other_boot else processes.boot_id(),
        server_pid=1,
        server_start_time=0,
        log_offset=0,
    )
    write_record(directory / "life.json", life)
    supervisor = node.start()
    assert node.until("r1", "running").pid != stranger.pid
    assert "not known" in node.said("replica.exited")[0]
    assert node.life("r1").life == 8, "numbers of lives are not used again"
    supervisor.stop_replica("r1")
    node.until("r1", "stopped")
    assert stranger.poll() is None


def test_damaged_records_are_as_good_as_none(node: Node) -> None:
    node.replica("r1", "sleep")
    directory = node.path("r1")
    directory.mkdir(parents=True)
    for name in ("state.json", "life.json", "exit.json"):
        (directory / name).write_bytes(b'{"life": ')
    node.start()
    node.until("r1", "running")


def test_the_idle_fork_server_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = tmp_path / "d" / "s"
    argv = [sys.executable, "-m", "agents.recovery.forkserver", "--socket", str(socket), "--idle-s", "0.2"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "no agent and no child" in out
    assert not socket.exists()


def test_exit_records_say_when(node: Node) -> None:
    before = time.time()
    node.replica("r1", "exit", "0")
    node.start()
    node.until("r1", "exited")
    end = read_record(node.path("r1") / "exit.json", Exit)
    assert end is not None
    assert before - 1 <= end.ended <= time.time() + 1
    assert (end.pid, end.exit_code, end.signal) == (node.life("r1").pid, 0, None)


def test_without_pidfds_the_start_time_is_checked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "a sandbox without pidfd_open")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    node.grace_s = 0.2
    node.replica("r1", "stubborn")
    supervisor = node.start()
    first = node.until("r1", "running")
    assert first.pid is not None
    wait_for(lambda: "not listening" in node.log("r1"))
    start = start_time_of(first.pid)
    assert start is not None
    assert Handle.open(first.pid, start - 1) is None
    supervisor.restart_replica("r1", "test")
    node.until("r1", "running", other_than=first.pid)
    assert not alive(first.pid)


def test_a_session_that_is_not_the_remembered_one_is_left_alone() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        start = start_time_of(process.pid)
        assert start is not None
        assert kill_session(process.pid, start - 1) == []
        assert process.poll() is None
        assert kill_session(process.pid, start) == [process.pid]
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(60)


def test_a_fork_server_told_to_end_keeps_its_child_and_gets_a_successor(node: Node) -> None:
    node.replica("r1", "polite", "76")
    node.replica("r2", "sleep", autostart=False)
    supervisor = node.start()
    node.until("r1", "running")
    wait_for(lambda: "listening" in node.log("r1"))
    server = node.server_pid("r1")
    os.kill(server, signal.SIGTERM)
    supervisor.start_replica("r2")
    node.until("r2", "running")
    assert node.server_pid("r2") != server
    assert alive(server)
    supervisor.stop_replica("r1")
    assert node.until("r1", "stopped").exit_code == 76, "known, since its server waited for it"
    wait_for(lambda: not alive(server), "the retired server to end")


def test_an_edited_script_is_imported_again(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "scripts"
    programs.mkdir()
    script = programs / "my_training.py"
    text = "import time\ndef main():\n    print('{}', flush=True)\n    time.sleep(600)\n"
    script.write_text(text.format("first version"), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(programs))
    node.preload = ["my_training"]
    node.replica("r1", module="my_training")
    supervisor = node.start()
    first = node.until("r1", "running")
    wait_for(lambda: "first version" in node.log("r1"))
    script.write_text(text.format("second version, edited"), encoding="utf-8")
    supervisor.restart_replica("r1", "new code")
    node.until("r1", "running", other_than=first.pid)
    wait_for(lambda: "second version" in node.log("r1"))
    assert "my_training.py changed" in node.said("forkserver.retired")[0]


def test_agents_killed_at_any_moment_never_run_a_replica_twice(node: Node, tmp_path: Path) -> None:
    """Agents that die early, in the middle of starting, stopping and restarting; then one that stays."""
    node.grace_s = 0.1
    for name in ("r1", "r2"):
        node.replica(name, "sleep")
    chance = random.Random(11)
    for _ in range(5):
        agent = node.agent()
        for command in ("restart_replica r1", "stop_replica r2", "start_replica r2"):
            assert agent.process.stdin is not None
            agent.process.stdin.write(command + "\n")
        agent.process.stdin.flush()
        time.sleep(chance.uniform(0.0, 0.15))
        agent.kill()
    supervisor = node.start()
    supervisor.start_replica("r2")  # the last agent may have got no further than to stop it
    first, second = node.until("r1", "running"), node.until("r2", "running")
    replicas = {first.pid, second.pid}
    servers = {node.server_pid("r1"), node.server_pid("r2")}
    wait_for(lambda: set(processes_of(node.state)) == replicas | servers, "one process a replica")
