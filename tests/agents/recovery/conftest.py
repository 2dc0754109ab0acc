"""A node with supervised replicas, in this process or under an agent process that can be killed. Leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.api.models import ProcessView
from agents.recovery.records import Life, read_record
from agents.recovery.supervisor import Supervisor
from agents.settings import AgentSettings, Supervised, Supervision

PROGRAMS = Path(__file__).parent / "programs"
WAIT_S = 60.0  # for things that take milliseconds: only to fail rather than hang


def wait_for(check: Callable[[], object], what: str = "it", timeout_s: float = WAIT_S) -> object:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")


def processes_of(directory: Path) -> list[int]:
    """Living processes with the directory in their command line: fork servers, and all that was forked from them."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and str(directory).encode() in Path("/proc", entry, "cmdline").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def alive(pid: int) -> bool:
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


class AgentProcess:
    def __init__(self, node: Node) -> None:
        settings = node.directory / "settings.json"
        settings.write_text(node.settings().model_dump_json(), encoding="utf-8")
        self.events_path = node.directory / "events.jsonl"
        program = [sys.executable, str(PROGRAMS / "agent_process.py"), str(settings), str(self.events_path)]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def views(self) -> dict[str, ProcessView]:
        return {view["replica"]: ProcessView.model_validate(view) for view in json.loads(self.tell("views"))}

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self, how: str) -> None:
        assert self.tell(f"close {how}") == "closed"
        self._end()

    def _end(self) -> None:
        self.process.wait(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Node:
    """A state directory, the replicas of its settings, and at most one supervisor at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.events: list[tuple[str, str, str]] = []
        self.because: dict[str, list[str]] = {}  # incident -> kinds of events
        self.replicas: list[Supervised] = []
        self.preload = ["sample_replica"]
        self.grace_s = 5.0
        self.backoff_s = 0.05
        self.backoff_max_s = 0.2
        self.healthy_s = 30.0
        self.supervisor: Supervisor | None = None
        self.agents: list[AgentProcess] = []

    def replica(
        self, name: str, *args: str, module: str = "sample_replica", autostart: bool = True, **env: str
    ) -> None:
        self.replicas.append(Supervised(replica=name, module=module, args=list(args), autostart=autostart, env=env))

    def settings(self) -> AgentSettings:
        supervision = Supervision(
            preload=self.preload,
            grace_s=self.grace_s,
            backoff_s=self.backoff_s,
            backoff_max_s=self.backoff_max_s,
            healthy_s=self.healthy_s,
            replicas=self.replicas,
        )
        return AgentSettings(
            node="node1",
            state_dir=self.state,
            tokens_file=self.directory / "tokens.yaml",
            ranks_socket=self.directory / "ranks.sock",
            supervision=supervision,
        )

    def start(self) -> Supervisor:
        self.supervisor = Supervisor(self.settings(), self._heard)
        self.supervisor.start()
        return self.supervisor

    def close(self, keep_processes: bool = False) -> None:
        if self.supervisor is not None:
            self.supervisor.close(keep_processes)
            self.supervisor = None

    def agent(self) -> AgentProcess:
        agent = AgentProcess(self)
        self.agents.append(agent)
        return agent

    def view(self, name: str) -> ProcessView:
        assert self.supervisor is not None
        return next(view for view in self.supervisor.views() if view.replica == name)

    def until(self, name: str, state: str, *, restarts: int = 0, other_than: int | None = None) -> ProcessView:
        """Wait for a replica's state; `other_than` a process of before."""

        def check() -> ProcessView | None:
            view = self.view(name)
            good = view.state == state and view.restarts >= restarts
            good = good and (state != "exited" or view.exit_code is not None)  # else it is not known yet
            return view if good and (other_than is None or view.pid != other_than) else None

        try:
            found = wait_for(check, f"{name} {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}: it is {self.view(name)}; events: {self.events[-5:]}") from None
        assert isinstance(found, ProcessView)
        return found

    def _heard(
        self, kind: str, thing: str, reason: str, /, *, incident: str = "", action: str = "", injected: bool = False
    ) -> None:
        self.events.append((kind, thing, reason))
        if incident:
            self.because.setdefault(incident, []).append(kind)

    def said(self, kind: str, name: str = "") -> list[str]:
        return [reason for k, thing, reason in self.events if k == kind and (not name or thing == name)]

    def life(self, name: str) -> Life:
        life = read_record(self.path(name) / "life.json", Life)
        assert life is not None
        return life

    def path(self, name: str) -> Path:
        return self.state / "replicas" / name / "rank0"

    def log(self, name: str) -> str:
        path = self.path(name) / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def server_pid(self, name: str) -> int:
        return self.life(name).server_pid


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    node = Node(tmp_path)
    try:
        yield node
        node.close()
        for agent in node.agents:
            if agent.process.poll() is None:
                agent.close("stop")
        wait_for(lambda: not processes_of(tmp_path), "all processes of the test to end", 10.0)
    finally:
        for agent in node.agents:
            agent.process.kill()
            agent.process.wait(WAIT_S)
        for pid in processes_of(tmp_path):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
