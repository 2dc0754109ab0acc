"""Replica processes as an operator sees them: started, stopped, restarted, failed, each with the reason why."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from agents.because import Because
from agents.job import JobRelay
from agents.recovery.child import Output
from agents.recovery.errors import SupervisionUnavailable, UnknownReplica
from agents.recovery.supervisor import Supervisor
from agents.replicas import ReplicaActions
from agents.settings import SettingsProblem, Supervised
from ftar_core.wire.exits import RankExit

from .conftest import Node, alive, processes_of, wait_for


def facts(path: Path) -> dict[str, object]:
    wait_for(path.exists, str(path))
    loaded: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def test_a_forked_replica_is_a_process_like_any_other(node: Node, tmp_path: Path) -> None:
    node.preload = ["sample_replica", "numpy.random"]
    for name in ("r1", "r2"):
        node.replica(name, "facts", str(tmp_path / name), EXTRA="here")
    node.start()
    one, two = facts(tmp_path / "r1"), facts(tmp_path / "r2")
    life = node.life("r1")
    assert one["pid"] == life.pid
    assert one["imported_by"] == life.server_pid  # nothing was imported again
    assert one["session"] == life.pid
    assert one["argv"][1:] == ["facts", str(tmp_path / "r1")]  # type: ignore[index]
    assert one["name"] == "sample_replica"
    assert one["stdin"] == "/dev/null"
    assert one["threads"] == 1
    assert one["sigterm_is_default"] is True
    assert one["blocked"] == []
    assert one["comm"] == "ftar:r1/0"
    assert one["cwd"] == os.getcwd()
    descriptors = one["descriptors"]
    assert isinstance(descriptors, list)
    assert len(descriptors) == 4, "its three, and the directory it lists them from"
    env = one["env"]
    assert isinstance(env, dict)
    assert (env["FTAR_REPLICA"], env["FTAR_NODE"], env["RANK"], env["EXTRA"]) == ("r1", "node1", "0", "here")
    assert env["FTAR_AGENT"] == str(tmp_path / "ranks.sock")
    assert one["random"] != two["random"]
    assert one["numpy_random"] != two["numpy_random"]
    done = node.until("r1", "exited")
    assert (done.exit_code, done.pid, done.restarts) == (0, None, 0)
    assert "finished" in done.reason


def test_a_killed_replica_starts_again(node: Node) -> None:
    node.replica("r1", "sleep")
    node.start()
    first = node.until("r1", "running")
    assert first.pid is not None
    wait_for(lambda: "asleep" in node.log("r1"))
    os.kill(first.pid, signal.SIGKILL)
    second = node.until("r1", "running", restarts=1)
    assert second.pid != first.pid
    assert second.restarts == 1
    [exited] = node.said("replica.exited", "r1")
    assert "killed by SIGKILL" in exited
    assert "asleep" in exited, "the last lines of its log"
    assert len(node.said("replica.started", "r1")) == 2
    wait_for(lambda: node.log("r1").count("asleep") == 2)
    wait_for(lambda: (node.view("r1").rss_mb or 0) > 1)


def test_a_crash_loop_backs_off_and_shows_the_traceback(node: Node) -> None:
    node.replica("r1", "raise")
    node.start()
    wait_for(lambda: len(node.said("replica.exited")) >= 4)
    reason = node.said("replica.exited")[3]
    assert "exited with code 1" in reason
    assert "4 times in a row" in reason
    assert "ZeroDivisionError" in reason
    assert "\x1b" not in reason
    assert node.said("replica.backoff")[:3] == [
        "starts again in 0.1 s",
        "starts again in 0.1 s",
        "starts again in 0.2 s",
    ]
    assert "about to divide" in node.log("r1")
    assert "forkserver.py" not in node.log("r1"), "a traceback of the script, not of what led to it"
    assert node.supervisor is not None
    node.supervisor.stop_replica("r1")
    node.until("r1", "stopped")
    count = len(node.said("replica.started"))
    assert node.view("r1").next_start_s is None
    node.close()
    assert len(node.said("replica.started")) == count


@pytest.mark.parametrize(
    ("code", "state", "event", "words"),
    [
        (RankExit.FINISHED, "exited", "replica.exited", "not started again"),
        (RankExit.USAGE, "failed", "replica.failed", "leaving with 2"),
        (RankExit.REFUSED, "failed", "replica.failed", "refused by the job"),
        (RankExit.DRAINED, "stopped", "replica.exited", "waits for a rejoin"),
    ],
)
def test_exit_codes_that_starting_again_does_not_help(
    node: Node, code: RankExit, state: str, event: str, words: str
) -> None:
    node.replica("r1", "exit", str(int(code)))
    supervisor = node.start()
    view = node.until("r1", state)
    assert view.exit_code == code
    assert words in view.reason
    assert words in node.said(event, "r1")[-1]
    supervisor.rejoin("r1")  # an operator may try again
    wait_for(lambda: len(node.said("replica.started")) == 2)
    node.until("r1", state)


def test_exit_code_75_starts_again(node: Node, tmp_path: Path) -> None:
    what = tmp_path / "what"
    what.write_text("75", encoding="ascii")
    node.replica("r1", "exit-from-file", str(what))
    node.start()
    wait_for(lambda: node.said("replica.exited"))
    what.write_text("sleep", encoding="ascii")
    node.until("r1", "running", restarts=1)
    assert "asks to be started again" in node.said("replica.exited")[0]


def test_a_rejoin_while_the_drained_process_is_still_ending_is_not_lost(node: Node) -> None:
    # `ftctl drain` returns when the coordinator has let it go; closing its links and torch takes it seconds more.
    node.replica("r1", "polite", str(int(RankExit.DRAINED)))
    supervisor = node.start()
    first = node.until("r1", "running")
    wait_for(lambda: "listening" in node.log("r1"))
    supervisor.rejoin("r1")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGTERM)
    second = node.until("r1", "running", restarts=1)
    assert "starts again as asked" in node.said("replica.exited", "r1")[0]
    wait_for(lambda: node.log("r1").count("listening") == 2)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGTERM)
    node.until("r1", "stopped")  # the next drain needs a rejoin of its own
    assert len(node.said("replica.started", "r1")) == 2


def test_stop_start_and_restart(node: Node) -> None:
    node.replica("r1", "polite", "0")
    node.replica("r2", "sleep", autostart=False)
    supervisor = node.start()
    first = node.until("r1", "running")
    assert node.view("r2").state == "stopped"
    wait_for(lambda: "listening" in node.log("r1"))
    supervisor.restart_replica("r1", "new data", Because("i-1", "restart", injected=True))
    second = node.until("r1", "running", restarts=1)
    assert second.pid != first.pid
    assert not node.said("replica.backoff"), "asked for, so not a failure"
    assert "new data" in node.said("replica.stopping")[0]
    assert node.because == {"i-1": ["replica.stopping", "replica.exited", "replica.started"]}
    wait_for(lambda: node.log("r1").count("listening") == 2)
    ReplicaActions(JobRelay(None), supervisor, 5.0).supervise("stop", "r1", "bad optic (by ann)")
    wait_for(lambda: len(node.said("replica.stopping", "r1")) == 2)
    assert "bad optic (by ann): SIGTERM sent" in node.said("replica.stopping", "r1")[1]
    stopped = node.until("r1", "stopped")
    assert stopped.exit_code == 0
    assert "stopped as asked" in stopped.reason
    supervisor.start_replica("r1")
    supervisor.start_replica("r2")
    node.until("r1", "running", other_than=second.pid)
    node.until("r2", "running")
    supervisor.rejoin("r2")  # runs: nothing happens
    assert len(node.said("replica.started", "r2")) == 1


def test_stop_and_start_in_one_breath_ends_with_a_running_replica(node: Node) -> None:
    node.replica("r1", "sleep")
    supervisor = node.start()
    first = node.until("r1", "running")
    supervisor.stop_replica("r1")
    supervisor.start_replica("r1")
    node.until("r1", "running", other_than=first.pid)
    assert first.pid is not None
    assert not alive(first.pid)


def test_a_replica_deaf_to_sigterm_is_killed_after_the_grace(node: Node) -> None:
    node.grace_s = 0.2
    node.replica("r1", "stubborn")
    supervisor = node.start()
    first = node.until("r1", "running")
    wait_for(lambda: "not listening" in node.log("r1"))
    supervisor.stop_replica("r1")
    stopped = node.until("r1", "stopped")
    assert stopped.exit_code == -signal.SIGKILL
    assert node.said("replica.killed", "r1")
    assert first.pid is not None
    assert not alive(first.pid)


@pytest.mark.parametrize("how", ["crash", "stop"])
def test_what_a_replica_started_goes_with_it(node: Node, tmp_path: Path, how: str) -> None:
    node.grace_s = 0.2
    node.backoff_s = node.backoff_max_s = 60.0
    node.replica("r1", "family", str(tmp_path / "child"), how)
    supervisor = node.start()
    wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    child = int((tmp_path / "child").read_text(encoding="ascii"))
    if how == "stop":
        supervisor.stop_replica("r1")
    node.until("r1", "backoff" if how == "crash" else "stopped")
    wait_for(lambda: not alive(child), "the replica's own child to be gone")


def test_a_segfault_leaves_its_stack_in_the_log(node: Node) -> None:
    node.backoff_s = node.backoff_max_s = 60.0
    node.replica("r1", "segfault")
    node.start()
    view = node.until("r1", "backoff")
    assert view.exit_code == -signal.SIGSEGV
    assert "SIGSEGV" in view.reason
    assert "Segmentation fault" in node.log("r1")
    assert view.next_start_s is not None
    assert view.next_start_s > 30


def test_scripts_of_all_kinds(node: Node) -> None:
    node.replica("plain", "76", module="plain_script")
    node.replica("gone", module="no_such_module")
    node.replica("talk", "say")
    node.backoff_s = node.backoff_max_s = 60.0
    node.start()
    assert node.until("plain", "stopped").exit_code == 76
    assert "plain script ran with ['76']" in node.log("plain")
    missing = node.until("gone", "failed")
    assert "there is no module 'no_such_module'" in missing.reason
    talk = node.until("talk", "backoff")
    assert talk.exit_code == 1
    assert "could not open the data" in talk.reason


def test_full_log_files_are_turned(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.recovery import logs

    directory = node.path("r1")
    directory.mkdir(parents=True)
    with (directory / "log").open("wb") as file:
        file.truncate(logs.LOG_LIMIT + 1)
    (directory / "log.1").write_text("older", encoding="utf-8")
    (directory / "log.2").write_text("oldest", encoding="utf-8")
    node.replica("r1", "exit", "0")
    node.start()
    node.until("r1", "exited")
    assert "leaving with 0" in node.log("r1")
    assert (directory / "log.1").stat().st_size == logs.LOG_LIMIT + 1
    assert (directory / "log.2").read_text(encoding="utf-8") == "older"
    assert sorted(p.name for p in directory.glob("log*")) == ["log", "log.1", "log.2"]


def test_a_growing_log_is_cut_while_the_replica_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.recovery import logs

    monkeypatch.setattr(logs, "LOG_LIMIT", 1000)
    path = tmp_path / "log"
    fd = logs.open_log(path)
    try:
        os.write(fd, b"a" * 900)
        assert not logs.cut(path)
        os.write(fd, b"b" * 200)
        assert logs.cut(path)
        os.write(fd, b"the latest\n")
    finally:
        os.close(fd)
    assert path.read_text(encoding="ascii") == "the latest\n"
    assert (tmp_path / "log.1").stat().st_size == 1100
    assert logs.tail(path, offset=1100) == ["the latest"]


def test_a_log_that_cannot_be_opened_is_a_reason_not_a_crash(node: Node) -> None:
    node.replica("r1", "sleep")
    (node.path("r1") / "log").mkdir(parents=True)
    node.start()
    wait_for(lambda: len(node.said("replica.backoff", "r1")) >= 2)
    assert "its log cannot be opened" in node.view("r1").reason
    (node.path("r1") / "log").rmdir()
    node.until("r1", "running")


def test_a_full_disk_under_the_records(node: Node) -> None:
    """life.json cannot be written: no process runs unrecorded. (A directory in its place stands for the disk.)"""
    node.replica("r1", "sleep")
    (node.path("r1") / "life.json").mkdir(parents=True)
    node.start()
    wait_for(lambda: len(node.said("replica.backoff", "r1")) >= 2)
    assert "cannot be recorded" in node.view("r1").reason
    assert len(processes_of(node.state)) == 1, "the fork server alone"
    (node.path("r1") / "life.json").rmdir()
    node.until("r1", "running")


def test_an_exit_status_that_cannot_be_written_is_asked_for(node: Node) -> None:
    node.replica("r1", "sleep")
    supervisor = node.start()
    first = node.until("r1", "running")
    (node.path("r1") / "exit.json").mkdir()  # os.replace refuses, as a full disk would
    supervisor.stop_replica("r1")
    assert node.until("r1", "stopped").exit_code == -signal.SIGTERM
    assert first.pid is not None
    (node.path("r1") / "exit.json").rmdir()


def test_unknown_replicas_and_bad_settings_are_refused(node: Node) -> None:
    node.replica("r1", "sleep", autostart=False)
    supervisor = node.start()
    assert supervisor.supervises("r1")
    assert not supervisor.supervises("r9")
    for call in (supervisor.start_replica, supervisor.stop_replica, supervisor.rejoin):
        with pytest.raises(UnknownReplica) as caught:
            call("r9")
        assert caught.value.code == "unknown-replica"
    with pytest.raises(SupervisionUnavailable, match="another agent"):
        Supervisor(node.settings(), lambda *_: None).start()
    node.replica("r1", "sleep")
    with pytest.raises(SettingsProblem, match="twice"):
        Supervisor(node.settings(), lambda *_: None)
    node.replicas = [Supervised(replica="../etc", module="sample_replica")]
    with pytest.raises(SettingsProblem, match="not a replica name"):
        Supervisor(node.settings(), lambda *_: None)


def test_two_ranks_of_a_replica_on_one_node(node: Node) -> None:
    node.replicas = [Supervised(replica="r1", rank=i, module="sample_replica", args=["sleep"]) for i in (0, 1)]
    supervisor = node.start()
    wait_for(lambda: [v.state for v in supervisor.views()] == ["running", "running"])
    assert [v.rank for v in supervisor.views()] == [0, 1]
    assert {thing for kind, thing, _ in node.events if kind == "replica.started"} == {"r1", "r1/1"}
    supervisor.stop_replica("r1")
    wait_for(lambda: [v.state for v in supervisor.views()] == ["stopped", "stopped"])


def test_an_import_that_fails_is_the_replicas_trouble_only(node: Node) -> None:
    node.preload = ["no_such_module", "sample_replica"]
    node.replica("r1", "sleep")
    node.start()
    node.until("r1", "running")
    assert "no_such_module" in node.said("forkserver.import-failed")[0]


def test_an_import_that_starts_threads_means_new_interpreters(node: Node, tmp_path: Path) -> None:
    node.preload = ["threaded_import", "sample_replica"]
    node.replica("r1", "facts", str(tmp_path / "facts"))
    node.replica("r2", "exit", "76")
    node.start()
    assert node.until("r2", "stopped").exit_code is not None
    node.until("r1", "exited")
    assert "threads" in node.said("forkserver.threads")[0]
    assert node.life("r1").fresh


def test_an_import_that_crashes_the_fork_server(node: Node) -> None:
    node.preload = ["crashing_import"]
    node.replica("r1", module="crashing_import")
    node.start()
    node.until("r1", "exited")
    assert "without imports" in node.said("forkserver.lost")[1]
    assert "imported here after all" in node.log("r1")


def test_closing_stops_everything(node: Node) -> None:
    node.grace_s = 0.3
    node.replica("r1", "sleep")
    node.replica("r2", "stubborn")
    node.start()
    node.until("r1", "running")
    node.until("r2", "running")
    wait_for(lambda: "not listening" in node.log("r2"))
    node.close(keep_processes=False)
    assert processes_of(node.state) == []
    node.start()  # what is wanted has not changed
    node.until("r1", "running")
    node.until("r2", "running")


def test_a_full_disk_under_the_log_does_not_end_the_training() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)  # full(4): every write fails with ENOSPC
    with pytest.raises(OSError, match="No space left"):
        os.write(fd, b"x")
    with Output(fd, "w") as output:
        assert output.write(b"step 12 loss 3.1\n") == 17
