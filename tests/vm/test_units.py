"""packaging/systemd under a real systemd, installed as packaging/README.md says (`make vm`, as root)."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .booted import CHECKOUT, Booted, booted, lacking

README = CHECKOUT / "packaging" / "README.md"
PROGRAMS = Path(__file__).parent / "programs"
UNITS = ("ft-agent", "ft-agent-helper")
TOKEN = "a-token-of-the-chaos-role"
INVENTORY = """
version: 1
job: none
token_file: /root/token
nodes: [{name: node0, url: "http://127.0.0.1:7610"}]
"""
REPLICA = """
supervision:
  backoff_s: 0.05
  replicas: [{replica: r0, module: standing_rank}]
"""
# systemd-analyze security: 0 is no right at all, 10 everything (an ordinary service: 9.6); as README says.
AT_MOST = {"ft-agent": 2.6, "ft-agent-helper": 2.4}

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(900)]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.2)


class Node:
    def __init__(self, machine: Booted) -> None:
        self.machine = machine

    def install(self) -> None:
        """The commands of the page, but for those that download."""
        (block,) = re.findall(r"```\n(.*?)```", README.read_text(), re.DOTALL)
        lines = [line for line in block.splitlines() if "pip install" not in line]
        assert len(lines) > 4
        self.machine.shell(f"ln -s {sys.prefix} /opt/ftctl")
        self.machine.write("/root/tokens.yaml", json.dumps([{"principal": "ann", "role": "chaos", "token": TOKEN}]))
        self.machine.write("/root/token", TOKEN, 0o600)
        self.machine.write("/root/inventory.yaml", INVENTORY)
        self.machine.write(
            "/etc/systemd/system/ft-agent.service.d/path.conf", f"[Service]\nEnvironment=PYTHONPATH={PROGRAMS}\n"
        )
        self.machine.shell("cp -r {}/packaging /root/; cd /root; {}".format(CHECKOUT, "\n".join(lines)))

    def ftctl(self, *words: str) -> str:
        return self.machine.do("/opt/ftctl/bin/ftctl", *words, "--inventory", "/root/inventory.yaml")

    def inject(self, *words: str) -> str:
        """The fault's id."""
        said = self.ftctl(
            "inject", *words, "--override", "nodes_percent", "--reason", "a test of the units", "-o", "json"
        )
        (fault,) = json.loads(said)["faults"]
        assert fault["state"] == "active", fault
        return str(fault["id"])

    def state(self, fault: str) -> str:
        found = json.loads(self.ftctl("faults", "--all", "-o", "json"))["faults"]
        return next((one["state"] for one in found if one["id"] == fault), "gone")

    def is_up(self, nic: str) -> bool:
        return "UP" in self.machine.do("ip", "-br", "link", "show", nic).split()

    def pid(self, unit: str) -> int:
        return int(self.machine.shown(unit, "MainPID"))

    def status(self, pid: int) -> dict[str, str]:
        lines = self.machine.do("cat", f"/proc/{pid}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def replica(self) -> int:
        """The process of r0 that has registered; 0: none."""
        ranks = json.loads(self.ftctl("ranks", "r0", "-o", "json"))["ranks"]
        return next((int(rank["report"]["pid"]) for rank in ranks if rank["report"]), 0)

    def lives(self, pid: int) -> bool:
        return self.machine.run("grep", "-q", "State:.[SRD]", f"/proc/{pid}/status").returncode == 0

    def processes(self, words: str) -> list[int]:
        return [int(pid) for pid in self.machine.run("pgrep", "-f", words).stdout.split()]

    def since(self) -> str:
        return self.machine.do("date", "+%Y-%m-%d %H:%M:%S.%N").strip()


@pytest.fixture(scope="module")
def installed() -> Iterator[Node]:
    if why := lacking():
        pytest.skip(why)
    with booted() as machine:
        node = Node(machine)
        node.install()
        yield node


@pytest.fixture
def node(installed: Node) -> Node:
    """Both units run, with the configuration that ships and one replica."""
    machine = installed.machine
    machine.shell(f"install -m 0644 {CHECKOUT}/packaging/agent.yaml {CHECKOUT}/packaging/helper.yaml /etc/ftctl/")
    machine.shell(f"cat >> /etc/ftctl/agent.yaml <<'E'\n{REPLICA}\nE")
    machine.do("systemctl", "restart", *UNITS)
    until(lambda: installed.replica() > 0, "the replica runs")
    return installed


def test_start_means_that_they_answer_and_only_the_helper_has_rights(node: Node) -> None:
    for unit in UNITS:
        assert node.machine.shown(unit, "ActiveState") == "active"
    status = node.machine.run("/opt/ftctl/bin/ftctl", "status", "--inventory", "/root/inventory.yaml")
    assert "eth1 up" in status.stdout, "and not that there is no coordinator"
    agent = node.status(node.pid("ft-agent"))
    uid = node.machine.do("id", "-u", "ftctl").strip()
    assert agent["Uid"].split() == [uid] * 4 != ["0"] * 4
    for rights in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"):
        assert int(agent[rights], 16) == 0, rights
    assert agent["NoNewPrivs"] == "1"
    helper = node.status(node.pid("ft-agent-helper"))
    assert helper["Uid"].split() == ["0"] * 4
    assert int(helper["CapEff"], 16) == 1 << 12 | 1 << 5, "CAP_NET_ADMIN, CAP_KILL"
    assert helper["Seccomp"] == "2"


def test_systemd_has_nothing_to_say_against_them(node: Node) -> None:
    for unit in UNITS:
        said = node.machine.run("systemd-analyze", "verify", "--man=no", f"/etc/systemd/system/{unit}.service")
        assert (said.returncode, said.stderr) == (0, ""), said.stderr
        exposed = node.machine.do("systemd-analyze", "security", "--no-pager", f"{unit}.service")
        (level,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", exposed)
        assert float(level) <= AT_MOST[unit], exposed


def test_a_fault_is_made_and_taken_back_through_them(node: Node) -> None:
    fault = node.inject("link-down", "--node", "node0", "--nic", "eth1", "--duration", "120s")
    assert not node.is_up("eth1")
    node.ftctl("revert", fault)
    assert node.state(fault) == "reverted"
    assert node.is_up("eth1")
    fault = node.inject("link-loss", "--node", "node0", "--nic", "eth2", "--percent", "20", "--duration", "120s")
    node.ftctl("revert", fault)
    assert node.machine.do("nft", "list", "ruleset") == ""
    asked = node.machine.do("cat", "/var/lib/ftctl-helper/audit.jsonl")
    assert "link-loss" in asked


def test_a_killed_agent_comes_back_takes_its_faults_back_and_keeps_its_replicas(node: Node) -> None:
    replica, agent = node.replica(), node.pid("ft-agent")
    fault = node.inject("link-down", "--node", "node0", "--nic", "eth1", "--duration", "600s")
    node.machine.do("kill", "-9", str(agent))
    until(lambda: node.pid("ft-agent") not in (0, agent), "systemd starts it again")
    until(lambda: node.is_up("eth1"), "the fault is taken back")
    until(lambda: node.machine.shown("ft-agent", "ActiveState") == "active", "it answers")
    assert node.state(fault) == "reverted"
    until(lambda: node.replica() > 0, "the replica registers with the new agent")
    assert node.replica() == replica, "the replica did not notice"
    assert node.status(replica)["Uid"].split()[0] != "0"


def test_a_killed_helper_leaves_nothing_in_force(node: Node) -> None:
    helper = node.pid("ft-agent-helper")
    fault = node.inject("link-down", "--node", "node0", "--nic", "eth2", "--duration", "600s")
    node.machine.do("kill", "-9", str(helper))
    until(lambda: node.is_up("eth2"), "the next helper takes it back")
    until(lambda: node.machine.shown("ft-agent-helper", "ActiveState") == "active", "it answers")
    until(lambda: node.state(fault) == "reverted", "the agent hears of it")
    assert len(node.processes("agents.injection.watchdog.*ftctl-helper")) <= 1


def test_stop_takes_faults_back_and_leaves_replicas(node: Node) -> None:
    replica = node.replica()
    node.inject("link-down", "--node", "node0", "--nic", "eth1", "--duration", "600s")
    node.inject("proc-hang", "--node", "node0", "--replica", "r0", "--duration", "600s")
    assert node.status(replica)["State"].startswith("T")
    node.machine.do("systemctl", "stop", "ft-agent")
    assert node.is_up("eth1")
    assert node.lives(replica), "it was stopped, and goes on"
    node.machine.do("systemctl", "stop", "ft-agent-helper")
    assert node.machine.shown("ft-agent-helper", "Result") == "success"
    assert node.processes("agents.injection.watchdog") == []
    node.machine.do("systemctl", "start", *UNITS)
    until(lambda: node.replica() > 0, "the replica registers with the new agent")
    assert node.replica() == replica, "an upgrade of the agent is no end of the training"


@pytest.mark.parametrize(
    ("unit", "file", "line", "says"),
    [
        ("ft-agent", "agent.yaml", "rial: [eth1]", "agent.yaml: rial: there is no such setting"),
        ("ft-agent-helper", "helper.yaml", "max_fault: 1", "helper.yaml: Object contains unknown field `max_fault`"),
    ],
)
def test_a_wrong_setting_is_one_line_of_the_journal(node: Node, unit: str, file: str, line: str, says: str) -> None:
    before, replica = node.since(), node.replica()
    other = next(one for one in UNITS if one != unit)
    node.machine.shell(f"echo '{line}' >> /etc/ftctl/{file}")
    assert node.machine.run("systemctl", "restart", unit).returncode != 0, "whoever asked is told"
    time.sleep(2.5)  # longer than RestartSec
    assert node.machine.shown(unit, "ActiveState") == "failed", "the same file is not tried again and again"
    said = node.machine.journal(unit, f"--since={before}", f"_SYSTEMD_UNIT={unit}.service").splitlines()
    lines = [one for one in said if "error" in one.lower() or says in one or "Traceback" in one]
    assert lines == [f"{unit}: /etc/ftctl/{says}"], said
    assert node.machine.shown(other, "ActiveState") == "active"
    assert node.lives(replica)


def test_nothing_of_a_machine_is_left(tmp_path: Path) -> None:
    if why := lacking():
        pytest.skip(why)
    before = Path("/proc/self/mounts").read_text()
    with booted() as machine:
        machine.shell("setsid sleep 1000 >/dev/null 2>&1 & echo left")
        init = machine.init
    until(lambda: not Path(f"/proc/{init}").exists(), "its first process is gone")
    assert Path("/proc/self/mounts").read_text() == before
