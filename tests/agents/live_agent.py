"""A real ft-agent process for a test, with a client; whatever the test does, no process of it is left."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_agents import ForkedAgent
from ruamel.yaml import YAML

import agents

TOKENS = {"viewer": "viewer-token-0000", "operator": "operator-token-00", "chaos": "chaos-token-00000"}


def until(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Liveness only: generous, and says what it waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


class LiveAgent:
    def __init__(self, root: Path, user: int | None = None, **settings: Any) -> None:
        self.root = root
        self.user = user  # it runs as this one, without root
        self.state = root / "state"
        self.socket = root / "a.sock"
        self.config = root / "agent.yaml"
        self.log = root / "log"
        tokens = root / "tokens.yaml"
        write(tokens, [{"principal": f"the-{role}", "role": role, "token": token} for role, token in TOKENS.items()])
        self.settings = {
            "node": "node1",
            "state_dir": str(self.state),
            "listen": None,
            "unix_socket": str(self.socket),
            "tokens_file": str(tokens),
            "watch_links": False,  # other tests have links in this namespace too
            **settings,
        }
        self.process: subprocess.Popen[bytes] | ForkedAgent | None = None
        self._pids: set[int] = set()

    def start(self, *arguments: str, wait: bool = True) -> LiveAgent:
        write(self.config, self.settings)
        if self.user is None:
            self.process = ForkedAgent(self.config, arguments, self.log)
        else:
            self.process = self._of_user(self.user, arguments)
        self._pids.add(self.process.pid)
        if wait:
            until(self._answers, f"the agent answers; its log: {self.text()}", 240)
            watchdog = self.get("/v1/node").json()["agent"]["watchdog_pid"]
            if watchdog:
                self._pids.add(watchdog)
        return self

    def _of_user(self, user: int, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        python, environment = python_of(user)
        for path in (self.root, *self.root.iterdir()):
            os.chown(path, user, user)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [python, "-m", "agents.daemon", "--config", str(self.config), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                user=user,
                group=user,
                extra_groups=[],
                env=environment,
            )

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def close(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(60)

    def client(self, role: str = "chaos") -> httpx.Client:
        headers = {"Authorization": f"Bearer {TOKENS[role]}"} if role in TOKENS else {}
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://agent", headers=headers, timeout=90)

    def get(self, path: str, role: str = "chaos") -> httpx.Response:
        with self.client(role) as client:
            return client.get(path)

    def post(self, path: str, body: Any = None, role: str = "chaos") -> httpx.Response:
        with self.client(role) as client:
            return client.post(path, json=body)

    def inject(self, **wish: Any) -> dict[str, Any]:
        response = self.post("/v1/faults", wish)
        assert response.status_code == 200, response.text
        fault: dict[str, Any] = response.json()
        return fault

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the agent ended with {self.process.returncode}: {self.text()}"
        try:
            return self.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False


@functools.cache
def python_of(user: int) -> tuple[str, dict[str, str]]:
    """An interpreter that this user may run and that finds the agent's code, and its environment: this one, unless it
    lies in somebody's home; then the system's, if it is of the same version. Skips the test if there is none."""
    version = f"python3.{sys.version_info.minor}"
    paths = os.pathsep.join([str(Path(agents.__file__).parents[1]), *(p for p in sys.path if "site-packages" in p)])
    finds = "all(importlib.util.find_spec(name) for name in ('agents.daemon', 'fastapi', 'uvicorn', 'msgspec'))"
    code = f"import importlib.util, subprocess, sys; assert {finds}; subprocess.run([sys.executable, '-V'], check=True)"
    systems = shutil.which(version, path="/usr/bin:/usr/local/bin") or sys.executable
    for python, more in ((sys.executable, {}), (systems, {"PYTHONPATH": paths})):
        env = {"PATH": os.environ.get("PATH", ""), **more}
        as_user: dict[str, Any] = {"user": user, "group": user, "extra_groups": [], "env": env, "cwd": "/"}
        with contextlib.suppress(OSError):
            done = subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False, **as_user)
            if done.returncode == 0:
                return python, env
    pytest.skip(f"user {user} can run no {version} that finds this code")


def write(path: Path, data: Any) -> None:
    path.touch(mode=0o600)
    with path.open("w") as file:
        YAML(typ="safe").dump(data, file)


@contextmanager
def live_agent(user: int | None = None, **settings: Any) -> Iterator[LiveAgent]:
    """Under /tmp, because pytest's own directories are too long for a Unix socket."""
    root = Path(tempfile.mkdtemp(prefix="ft-agent-"))
    agent = LiveAgent(root, user, **settings)
    try:
        yield agent
    finally:
        agent.close()
        shutil.rmtree(root, ignore_errors=True)
