"""An agent of a user without rights, and the helper of root: faults as ever, and none that stays whoever is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_network import Namespace, add_rail, add_routes, needs_root, settled
from live_agent import LiveAgent, live_agent, python_of, until
from live_helper import AGENT_UID, LiveHelper, live_helper
from pyroute2 import IPRoute

from agents.host.processes import start_time_of, state_of

pytestmark = [pytest.mark.root, needs_root]


@dataclass
class Node:
    agent: LiveAgent
    helper: LiveHelper
    ipr: IPRoute
    rail0: int
    before: set[str]

    def up(self) -> bool:
        return bool(self.ipr.get_links(self.rail0)[0]["flags"] & 1)

    def as_before(self) -> bool:
        return settled(self.ipr, self.rail0) == self.before

    def state(self, fault: str) -> str:
        state: str = self.agent.get(f"/v1/faults/{fault}").json()["state"]
        return state

    def events(self) -> list[str]:
        return [event["kind"] for event in self.agent.get("/v1/events").json()["events"]]

    def problems(self) -> str:
        return " ".join(problem["reason"] for problem in self.agent.get("/v1/node").json()["problems"])


@pytest.fixture
def node() -> Iterator[Node]:
    """The helper has two rails; the agent's own configuration, which its user may have written, says more."""
    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            rail0 = add_rail(ipr, "rail0", 0)
            for number, name in enumerate(("rail1", "other0", "mgmt0"), 1):
                add_rail(ipr, name, number)
            add_routes(ipr, rail0, 0)
            before = settled(ipr, rail0)
            with live_helper(rails=["rail0", "rail1"], management_nic="mgmt0") as helper:
                rails = ["rail0", "rail1", "other0", "mgmt0"]
                with live_agent(user=AGENT_UID, rails=rails, helper_socket=str(helper.socket)) as agent:
                    yield Node(agent, helper, ipr, rail0, before)
    finally:
        namespace.close()


def test_faults_of_an_agent_without_rights(node: Node) -> None:
    node.agent.start("--allow-faults")
    assert "ft-agent-helper does not answer" in node.problems(), "it is earlier than its helper"
    node.helper.start()
    rights = Path(f"/proc/{node.agent.pid}/status").read_text()
    assert f"CapEff:\t{0:016x}" in rights
    assert f"Uid:\t{AGENT_UID}\t" in rights
    until(lambda: "helper.found" in node.events(), "the agent finds its helper")

    fault = node.agent.inject(kind="link-down", nic="rail0", duration_s=60, request_id="one")
    assert not node.up()
    assert fault["state"] == "active"
    assert fault["undo"], "what a person would do"
    assert node.agent.get("/v1/faults/one").json()["id"] == fault["id"]
    assert node.agent.inject(kind="noop", duration_s=60)["state"] == "active", "needs no rights, and no helper"
    for nic, words in (("mgmt0", "management NIC"), ("other0", "not declared as a rail")):
        answer = node.agent.post("/v1/faults", {"kind": "link-down", "nic": nic, "allow_last_rail": True})
        assert (answer.status_code, answer.json()["code"]) == (409, "refused"), answer.text
        assert words in answer.json()["reason"], "the helper refuses it, whatever the agent's configuration says"
    kinds = {kind["kind"]: kind for kind in node.agent.get("/v1/fault-kinds").json()}
    assert kinds["link-down"]["supported"], kinds["link-down"]
    reverted = node.agent.post(f"/v1/faults/{fault['id']}/revert").json()["faults"][0]
    assert reverted["state"] == "reverted"
    assert node.as_before()
    until(lambda: "fault.reverted" in node.events(), "the helper's events are among the agent's")

    gone = node.agent.post("/v1/faults/never-made/revert")
    assert gone.json()["code"] == "unknown-fault"
    late = node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail0", "request_id": "never-made"})
    assert "taken back before it arrived" in late.json()["reason"]

    again = node.agent.inject(kind="link-down", nic="rail0", duration_s=60)
    halted = node.agent.post("/v1/faults/halt", {"reason": "enough"}).json()
    assert {one["id"]: one["state"] for one in halted["faults"]}[again["id"]] == "reverted"
    assert node.up()
    assert "enough" in node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail0"}).json()["reason"]
    node.agent.post("/v1/faults/allow", {"reason": "go on"})
    node.agent.inject(kind="link-down", nic="rail0", duration_s=60)
    assert node.agent.stop() == 0
    assert node.as_before(), "an agent that ends takes its faults along"


@pytest.mark.timeout(400)
def test_agent_killed_helper_killed_both_killed(node: Node) -> None:
    node.helper.start()
    node.agent.start("--allow-faults")
    left = node.agent.inject(kind="link-down", nic="rail0", duration_s=60)
    node.agent.kill()
    assert not node.up()
    node.agent.start("--allow-faults")
    assert node.up(), "a new agent has what its predecessor left taken back before it answers"
    until(lambda: node.state(left["id"]) == "reverted", "it knows of it")

    fault = node.agent.inject(kind="link-down", nic="rail0", duration_s=3)
    node.helper.kill()
    until(lambda: "nobody listens" in node.problems(), "the agent says that its helper is gone")
    answer = node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail1", "allow_last_rail": True}).json()
    assert answer["code"] == "failed"
    assert "nothing was injected: ft-agent-helper does not answer" in answer["reason"]
    assert node.agent.post("/v1/faults/revert-all").json()["code"] == "in-force"
    until(node.up, "the helper's watchdog ends the fault")
    node.helper.start()
    until(lambda: "ft-agent-helper" not in node.problems(), "the agent finds the new helper")
    until(lambda: node.state(fault["id"]) == "reverted", "and learns what became of the fault")

    node.agent.inject(kind="link-down", nic="rail0", duration_s=2)
    node.agent.kill()
    node.helper.kill()
    until(node.up, "the watchdog alone ends it")
    assert node.as_before()


def test_without_root_and_without_helper_it_is_said_what_to_do() -> None:
    with live_agent(user=AGENT_UID, rails=["lo"]) as agent:
        agent.start("--allow-faults")
        answer = agent.post("/v1/faults", {"kind": "link-down", "nic": "lo"}).json()
        assert answer["code"] == "unsupported"
        assert "helper_socket" in answer["reason"]
        assert "ft-agent-helper as root" in answer["reason"]
        assert agent.inject(kind="noop", duration_s=5)["state"] == "active"


RANK = """
import os, socket, sys, time
from ftar_core.wire.agentlink import RankRegister
from ftar_core.wire.codec import encode
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(encode(RankRegister(job="j", replica="r1", rank=0, pid=os.getpid(), rails=())))
time.sleep(600)
"""


def test_a_rank_that_registered_is_shown_to_the_helper_as_one() -> None:
    """Root wants to see that processes came to the agent by themselves; the rest of the way is as ever."""
    python, environment = python_of(AGENT_UID)
    with live_helper() as helper, live_agent(user=AGENT_UID) as agent:
        helper.start()
        agent.settings |= {"helper_socket": str(helper.socket), "ranks_socket": str(agent.root / "r.sock")}
        agent.start("--allow-faults")
        argv = [python, "-c", RANK, str(agent.root / "r.sock")]
        as_user: dict[str, Any] = {"user": AGENT_UID, "group": AGENT_UID, "extra_groups": [], "env": environment}
        with subprocess.Popen(argv, cwd="/", **as_user) as rank:
            try:
                until(lambda: bool(agent.get("/v1/node").json()["ranks"]), "the rank registers")
                until(lambda: "helper.found" in [e["kind"] for e in agent.get("/v1/events").json()["events"]], "found")
                wish = {"kind": "proc-hang", "replica": "r1", "duration_s": 60, "allow_last_replica": True}
                fault = agent.inject(**wish)
                assert fault["state"] == "active"
                assert state_of(rank.pid, start_time_of(rank.pid) or 0) == "T"
                after = agent.post(f"/v1/faults/{fault['id']}/revert").json()["faults"][0]
                assert after["state"] == "reverted"
                assert state_of(rank.pid, start_time_of(rank.pid) or 0) != "T"
            finally:
                rank.kill()
