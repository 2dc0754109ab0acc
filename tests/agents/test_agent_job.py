"""From the agent to a real coordinator, and what the agent says when there is none, or none of ours."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_agent import LiveAgent, live_agent, until

from agents.api.models import ActionAnswer, JobState, ReplicaAction
from agents.because import Because
from agents.job import JobRelay
from agents.problems import ApiProblem
from agents.replicas import ReplicaActions
from agents.settings import CoordinatorAccess

TOKEN, OPERATOR = "job-token-0123456789", "operator-token-0123456789"


def secret(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def coordinator() -> Iterator[tuple[int, Path]]:
    """A coordinator that waits for three replicas: (port, directory with its tokens)."""
    with tempfile.TemporaryDirectory(prefix="ft-job-") as name:
        root = Path(name)
        port_file = root / "port"
        arguments = [
            *("--job", "demo", "--replicas", "3", "--store", str(root / "store"), "--listen", "127.0.0.1:0"),
            *("--token-file", str(secret(root / "token", TOKEN))),
            *("--operator-token-file", str(secret(root / "operator", OPERATOR))),
            *("--port-file", str(port_file)),
        ]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ftar_core.coordinator", *arguments], stdout=log, stderr=log, cwd="/"
            )
        try:
            until(lambda: port_file.exists() and bool(port_file.read_text().strip()), "the coordinator listens")
            yield int(port_file.read_text()), root
        finally:
            process.kill()
            process.wait(60)


@pytest.fixture(scope="module")
def agent(coordinator: tuple[int, Path]) -> Iterator[LiveAgent]:
    port, root = coordinator
    access = {"address": f"127.0.0.1:{port}", "job": "demo", "token_file": str(root / "operator")}
    with live_agent(coordinator=access) as agent:
        yield agent.start()


def test_the_job_through_any_agent(agent: LiveAgent) -> None:
    job = JobState.model_validate(agent.get("/v1/job", role="viewer").json())
    assert (job.name, job.replicas_wanted) == ("demo", 3)
    assert job.state == "starting"
    assert job.settings


def test_where_the_jobs_time_goes_is_in_the_metrics_of_any_agent(agent: LiveAgent) -> None:
    text = agent.get("/metrics", role="viewer").text
    assert 'ftar_training_occasions_total{category="starting",cause="",job="demo"} 1.0' in text
    assert "ftctl_agent_resident_bytes" in text


def test_the_jobs_events(agent: LiveAgent) -> None:
    answer = agent.get("/v1/job/events", role="viewer").json()
    numbers = [event["seq"] for event in answer["events"]]
    assert numbers == sorted(numbers)
    if numbers:
        assert agent.get(f"/v1/job/events?after={answer['last']}").json()["events"] == []


@pytest.mark.parametrize("verb", ["drain", "evict", "rejoin"])
def test_a_replica_nobody_knows(agent: LiveAgent, verb: str) -> None:
    response = agent.post(f"/v1/job/replicas/r9/{verb}", {"reason": "test"}, role="operator")
    assert (response.status_code, response.json()["code"]) == (404, "unknown-replica")
    assert "r9" in response.json()["thing"]


# --- no coordinator -----------------------------------------------------------------------------------------------


def relay(tmp_path: Path, port: int, token: str = OPERATOR, job: str = "demo", timeout_s: float = 60) -> JobRelay:
    access = CoordinatorAccess(address=f"127.0.0.1:{port}", job=job, token_file=secret(tmp_path / "t", token))
    return JobRelay(access, timeout_s)


def why(relay: JobRelay, op: str = "status") -> str:
    with pytest.raises(ApiProblem) as caught:
        relay.request("ann", op)
    assert caught.value.body.code in ("coordinator", "no-coordinator")
    relay.close()
    return caught.value.body.reason


def test_a_dead_coordinator(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "not running" in why(relay(tmp_path, port))


def test_a_coordinator_that_hangs_and_a_change_whose_fate_is_not_known(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert why(relay(tmp_path, port, timeout_s=0.5)) == "no answer in time"
        assert "is not known" in why(relay(tmp_path, port, timeout_s=0.5), "evict")


def test_something_else_on_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.recv(100)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert "no coordinator" in why(relay(tmp_path, server.getsockname()[1]))
        thread.join(60)


def test_a_wrong_token_and_a_wrong_job(tmp_path: Path, coordinator: tuple[int, Path]) -> None:
    port, _root = coordinator
    assert "demo" in why(relay(tmp_path, port, job="other"))
    assert "token" in why(relay(tmp_path, port, token="another-token-0123456789"))


def test_a_token_file_that_is_missing(tmp_path: Path) -> None:
    access = CoordinatorAccess(address="127.0.0.1:1", job="demo", token_file=tmp_path / "none")
    assert "none" in why(JobRelay(access))


# --- replicas supervised here -------------------------------------------------------------------------------------


class FakeRelay:
    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse = refuse
        self.asked: list[str] = []

    def act(self, principal: str, op: str, reason: str, **_kwargs: Any) -> ActionAnswer:
        self.asked.append(op)
        if self.refuse:
            raise ApiProblem("refused", "replica r1", "below min-replicas")
        return ActionAnswer(code="ok", text="done")


class FakeSupervisor:
    """One replica r1 with a process that ends when told to, or by itself."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.pid: int | None = 41

    def supervises(self, name: str) -> bool:
        return name == "r1"

    def views(self) -> list[Any]:
        from agents.api.models import ProcessView

        state = "running" if self.pid else "exited"
        return [ProcessView(replica="r1", rank=0, pid=self.pid, state=state)]

    def rejoin(self, name: str, because: Because) -> None:
        self.did.append("rejoin")

    def leaves(self, name: str, because: Because) -> None:
        self.did.append(f"leaves: {because.incident}")

    def stop_replica(self, name: str, reason: str, because: Because) -> None:
        self.did.append(f"stop: {reason}")

    def restart_replica(self, name: str, reason: str, because: Because) -> None:
        self.did.append(f"restart: {reason}")
        self.pid = 42


def actions(relay: FakeRelay, supervisor: FakeSupervisor, grace_s: float = 0.2) -> ReplicaActions:
    return ReplicaActions(relay, supervisor, grace_s)  # type: ignore[arg-type]


WISH = ReplicaAction(reason="test")


def test_a_rejoin_starts_the_process_if_the_coordinator_agrees() -> None:
    supervisor = FakeSupervisor()
    answer = actions(FakeRelay(), supervisor).rejoin("ann", "r1", WISH)
    assert supervisor.did == ["rejoin"]
    assert "started on this node" in answer.text
    with pytest.raises(ApiProblem):
        actions(FakeRelay(refuse=True), supervisor).rejoin("ann", "r1", WISH)
    assert supervisor.did == ["rejoin"]


def test_a_rejoin_of_a_replica_of_another_node_only_asks() -> None:
    supervisor = FakeSupervisor()
    actions(FakeRelay(), supervisor).rejoin("ann", "r2", WISH)
    assert supervisor.did == []


def test_an_evicted_process_that_does_not_end_is_ended() -> None:
    supervisor = FakeSupervisor()
    actions(FakeRelay(), supervisor).evict("ann", "r1", WISH)
    until(lambda: supervisor.did == ["restart: evicted, and it did not end by itself"], "the process is restarted")


def test_an_evicted_process_that_ends_by_itself_is_left_to_its_supervisor() -> None:
    supervisor = FakeSupervisor()
    actions(FakeRelay(), supervisor, grace_s=5).evict("ann", "r1", WISH)
    supervisor.pid = 43
    until(lambda: not [t for t in threading.enumerate() if t.name == "evict"], "nothing more is planned")
    assert supervisor.did == []


def test_evicted_for_good_is_stopped() -> None:
    supervisor = FakeSupervisor()
    actions(FakeRelay(), supervisor).evict("ann", "r1", ReplicaAction(reason="test", rejoin=False))
    actions(FakeRelay(), supervisor).evict("policy-node1", "r1", ReplicaAction(reason="rule x", rejoin=False))
    assert supervisor.did == ["stop: evicted by ann: test", "stop: evicted by policy of node1: rule x"]


def test_a_process_that_is_to_leave_knows_why_and_after_a_refusal_it_does_not() -> None:
    supervisor = FakeSupervisor()
    wish = ReplicaAction(reason="test", incident="i-1")
    actions(FakeRelay(), supervisor).drain("ann", "r1", wish)
    with pytest.raises(ApiProblem):
        actions(FakeRelay(refuse=True), supervisor).drain("ann", "r1", wish)
    assert supervisor.did == ["leaves: i-1", "leaves: i-1", "leaves: "]


def test_a_restart_because_of_an_incident_is_announced_and_waits_for_no_coordinator() -> None:
    supervisor, relay = FakeSupervisor(), FakeRelay(refuse=True)
    actions(relay, supervisor).restart("policy-node1", "r1", "rule x", Because("i-1", "restart"))
    assert relay.asked == ["restarts"]
    assert supervisor.did == ["restart: restarted by policy of node1: rule x"]


def test_dry_runs_and_refusals_touch_no_process() -> None:
    supervisor = FakeSupervisor()
    actions(FakeRelay(), supervisor, grace_s=0).evict("ann", "r1", ReplicaAction(reason="test", dry_run=True))
    with pytest.raises(ApiProblem):
        actions(FakeRelay(refuse=True), supervisor, grace_s=0).evict("ann", "r1", WISH)
    assert supervisor.did == []
