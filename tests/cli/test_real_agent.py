"""ftctl against a real agent: the same commands as against the fake one, so that the two cannot drift apart.

The fault is noop (a marker file), so it needs neither root nor a namespace; TLS is on 127.0.0.1.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificate
from ports import claim_port

from ftctl.app import main
from ftctl.context import World

from .conftest import Result, Run

CHAOS, VIEWER = "c" * 32, "v" * 32


class RealAgent:
    """`ft-agent` in a process of its own, on a Unix socket and on TLS at 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = claim_port()
        certificate(folder, "node0")
        _private(
            folder / "tokens.yaml",
            f"- {{principal: carla, role: chaos, token: {CHAOS}}}\n"
            f"- {{principal: victor, role: viewer, token: {VIEWER}}}\n",
        )
        _private(folder / "chaos", CHAOS)
        _private(folder / "viewer", VIEWER)
        (folder / "agent.yaml").write_text(
            f"node: node0\nstate_dir: {folder}/state\nlisten: 127.0.0.1:{self.port}\nunix_socket: {folder}/a.sock\n"
            f"tls_cert: {folder}/cert.pem\ntls_key: {folder}/key.pem\n"
            f"tokens_file: {folder}/tokens.yaml\nallow_faults: true\nmax_duration_s: 900\nwatch_links: false\n"
        )
        for name, url in (("unix", f"unix://{folder}/a.sock"), ("tls", f"https://127.0.0.1:{self.port}")):
            (folder / f"{name}.yaml").write_text(
                "version: 1\njob: main\ntoken_file: chaos\nca_file: cert.pem\n"
                f"nodes:\n  - {{name: node0, url: '{url}'}}\n"
            )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        code = "from agents.daemon import main; main()"
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(self.folder / "agent.yaml")], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "agent.log").read_text()
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(self.folder / "a.sock"))
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the agent did not come up")

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout=90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _private(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


@pytest.fixture
def agent(folder: Path) -> Iterator[RealAgent]:
    real = RealAgent(folder)
    real.start()
    yield real
    real.end()


@pytest.fixture
def run(bare: Run, world: World, agent: RealAgent) -> Run:
    def run(*args: str) -> Result:
        return bare(*args, "--inventory", str(agent.folder / "unix.yaml"))

    return run


def test_the_life_of_a_fault_as_an_operator_sees_it(run: Run, agent: RealAgent) -> None:
    status = run("status", "-o", "json")
    assert agent.process is not None
    assert status.json()["nodes"][0]["agent"]["pid"] == agent.process.pid
    assert status.code == 1  # this agent knows no coordinator
    assert any(p["object"] == "coordinator" for p in status.json()["problems"])

    done = run("inject", "noop", "--node", "node0", "--duration", "30s", "--reason", "drill", "-o", "json")
    assert done.code == 0
    (fault,) = done.json()["faults"]
    assert (fault["state"], fault["owner"], fault["reason"]) == ("active", "carla", "drill")
    assert 25 < fault["ttl_left_s"] <= 30
    assert fault["id"] in run("faults").out
    assert run("revert", fault["id"]).code == 0
    assert run("faults").err == "no faults\n"
    assert "fault.reverted" in run("events").out

    kinds = {kind["kind"] for kind in run("inject", "--list", "-o", "json").json()["kinds"]}
    assert {"noop", "link-down"} <= kinds

    for arguments, code, text in (
        (("inject", "noop", "--node", "node0", "--duration", "16m"), 2, "900 s"),
        (("inject", "link-down", "--node", "node0", "--nic", "nowhere0"), 2, "node0/nowhere0"),
        (("inject", "link-down", "--node", "node0", "--nic", "lo"), 7, "lo"),
        (("inject", "link-down", "--node", "node0", "--rail", "0"), 2, "no rails declared"),
        (("revert", "f-0"), 2, "f-0"),
        (("inject", "noop", "--node", "node0", "--token-file", str(agent.folder / "viewer")), 7, "viewer"),
        (("drain", "replica", "r1", "--reason", "x"), 2, "r1"),
        (("coordinator", "status"), 1, "coordinator"),
    ):
        refused = run(*arguments)
        assert (refused.code, text in refused.err) == (code, True), refused.err
    assert run("faults").err == "no faults\n"


BOOK = """\
version: 1
name: rehearsal
environments: [staging]
steady_state: [{expect: faults.active == 0}]
protect: {replicas: [r7], nodes: ["PATTERN"]}
method:
  - {inject: noop, target: {node: any}, duration: 5s}
"""


def test_what_a_playbook_or_an_agent_protects_is_refused_in_a_plan_and_shown(
    run: Run, bare: Run, agent: RealAgent, folder: Path
) -> None:
    inventory = agent.folder / "unix.yaml"
    inventory.write_text(inventory.read_text() + "environment: staging\n")
    path = folder / "book.yaml"
    path.write_text(BOOK.replace("PATTERN", "other*"))
    assert run("chaos", "plan", str(path)).code == 0
    path.write_text(BOOK.replace("PATTERN", "node[0-3]"))
    plan = run("chaos", "plan", str(path), "-o", "json")
    assert plan.code == 7
    (line,) = [line for line in plan.json()["plans"][0]["lines"] if line["code"]]
    assert f'node0: node0 is protected (nodes: "node[0-3]" in {path})' in line["says"]
    path.write_text(BOOK.replace("PATTERN", "other*").replace("node: any", "node: other1"))
    wrong = bare("chaos", "validate", str(path))
    assert wrong.code == 2
    assert f'{path}:7: other1 is protected (nodes: "other*" in this playbook)' in wrong.err
    path.write_text(BOOK.replace("r7", "'r 7'"))
    assert "is no pattern of a name" in bare("chaos", "validate", str(path)).err

    agent.end()
    config = agent.folder / "agent.yaml"
    config.write_text(config.read_text() + "protect: {nodes: [node0], nics: [eth9]}\n")
    agent.start()
    refused = run("inject", "noop", "--node", "node0", "--dry-run")
    assert refused.code == 7
    assert f'node0 is protected (nodes: "node0" in {config})' in refused.err
    assert ", protected" in run("status").out
    document = run("status", "-o", "json").json()["nodes"][0]
    assert document["protected"] == f'nodes: "node0" in {config}'
    assert document["protect"][0]["nics"] == ["eth9"]


def test_a_killed_agent_is_a_row_and_its_fault_is_gone_when_it_is_back(run: Run, agent: RealAgent) -> None:
    assert run("inject", "noop", "--node", "node0", "--duration", "30s").code == 0
    agent.end(signal.SIGKILL)
    dead = run("status")
    assert dead.code == 6
    assert "nobody listens on" in dead.out
    agent.start()
    assert run("faults").err == "no faults\n"
    assert "reverted" in run("faults", "--all").out


def test_over_tls_with_the_right_and_the_wrong_authority(
    agent: RealAgent, world: World, tmp_path: Path, bare: Run
) -> None:
    inventory = agent.folder / "tls.yaml"
    assert bare("faults", "--inventory", str(inventory)).code == 0
    certificate(tmp_path, "node0")  # another authority
    (agent.folder / "cert.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    refused = bare("faults", "--inventory", str(inventory))
    assert refused.code == 6
    assert "its certificate is not accepted" in refused.err
    (agent.folder / "cert.pem").write_text("nonsense")
    broken = bare("faults", "--inventory", str(inventory))
    assert broken.code == 2
    assert "no certificates" in broken.err
    plain = agent.folder / "plain.yaml"
    plain.write_text(inventory.read_text().replace("https:", "http:").replace("ca_file: cert.pem\n", ""))
    assert bare("faults", "--inventory", str(plain)).code == 6


def test_ctrl_c_at_any_moment_leaves_nothing_behind(run: Run, agent: RealAgent) -> None:
    """Signals at different moments: before, while and after the request is sent."""
    env = {**os.environ, "FTCTL_INVENTORY": str(agent.folder / "unix.yaml")}
    for delay_s in (0.1, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9):
        child = subprocess.Popen(
            [sys.executable, "-m", "ftctl", "inject", "noop", "--node", "node0", "--duration", "60s"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        time.sleep(delay_s)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=90)
        in_force = run("faults", "-o", "json").json()["faults"]
        if child.returncode == 0:  # it was over before the signal came, and said what is in force
            assert in_force[0]["id"] in err
            assert run("revert", "--all").code == 0
        else:
            # Python itself had not started yet: killed by the signal, or interrupted before it came to ftctl.
            early = child.returncode == -signal.SIGINT or ("KeyboardInterrupt" in err and "__main__.py" not in err)
            assert early or child.returncode == 130, err
            assert in_force == []


def test_the_tests_run_ftctl_in_this_process(world: World) -> None:
    """`main` returns its exit code and leaves the process alone."""
    assert main(["version"], world) == 0
