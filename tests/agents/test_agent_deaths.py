"""A real agent in a real network namespace, killed at bad moments: the link comes back, and nobody had to help."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_network import Namespace, add_rail, add_routes, needs_root, picture, settled
from live_agent import LiveAgent, live_agent, until
from pyroute2 import IPRoute

pytestmark = [pytest.mark.root, needs_root]


@dataclass
class Node:
    agent: LiveAgent
    ipr: IPRoute
    rail0: int

    def up(self) -> bool:
        return "up True" in picture(self.ipr, self.rail0)


@pytest.fixture
def node() -> Iterator[Node]:
    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            rail0 = add_rail(ipr, "rail0", 0)
            add_rail(ipr, "rail1", 1)
            add_routes(ipr, rail0, 0)
            settled(ipr, rail0)
            with live_agent(rails=["rail0", "rail1"]) as agent:
                yield Node(agent, ipr, rail0)
    finally:
        namespace.close()


def ended(pid: int) -> bool:
    """True if there is no such process, or only its remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def watchdog_of(node: Node) -> int:
    pid: int = node.agent.get("/v1/node").json()["agent"]["watchdog_pid"]
    assert pid
    return pid


def test_killed_with_a_link_down_in_force(node: Node) -> None:
    before = settled(node.ipr, node.rail0)
    node.agent.start("--allow-faults")
    watchdog = watchdog_of(node)
    begun = time.monotonic()
    node.agent.inject(kind="link-down", nic="rail0", duration_s=2)
    assert not node.up() or time.monotonic() > begun + 2
    node.agent.kill()
    assert not node.up() or time.monotonic() > begun + 2, "the watchdog waits for the end of the fault's time"
    until(node.up, "the link is up again")
    assert settled(node.ipr, node.rail0) == before
    until(lambda: ended(watchdog), "the watchdog ends when nothing is left to do")


def test_the_watchdog_is_deaf_to_a_closing_terminal(node: Node) -> None:
    node.agent.start("--allow-faults")
    watchdog = watchdog_of(node)
    assert os.getsid(watchdog) != os.getsid(node.agent.pid)
    node.agent.inject(kind="link-down", nic="rail0", duration_s=2)
    node.agent.kill()
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(watchdog, number)
    until(node.up, "the link is up again")


def test_stopped_and_never_continued(node: Node) -> None:
    """SIGSTOP: the agent lives and does nothing. The watchdog steps in when the fault is overdue."""
    node.agent.start("--allow-faults")
    node.agent.inject(kind="link-down", nic="rail0", duration_s=1)
    os.kill(node.agent.pid, signal.SIGSTOP)
    until(node.up, "the link is up again")


def test_a_new_agent_takes_back_at_once_what_a_killed_one_left(node: Node) -> None:
    before = settled(node.ipr, node.rail0)
    node.agent.start("--allow-faults")
    old = watchdog_of(node)
    fault = node.agent.inject(kind="link-down", nic="rail0", duration_s=600)
    node.agent.kill()
    node.agent.start("--allow-faults")
    assert node.up()
    assert settled(node.ipr, node.rail0) == before
    after = node.agent.get(f"/v1/faults/{fault['id']}").json()
    assert after["state"] == "reverted"
    assert "started anew" in after["detail"]
    until(lambda: ended(old), "the old watchdog ends")
    assert not ended(watchdog_of(node))


def test_also_one_that_may_not_inject_takes_back(node: Node) -> None:
    node.agent.start("--allow-faults")
    node.agent.inject(kind="link-down", nic="rail0", duration_s=600)
    node.agent.kill()
    node.agent.start()
    until(node.up, "the link is up again")


def test_a_killed_watchdog_is_replaced(node: Node) -> None:
    node.agent.start("--allow-faults")
    first = watchdog_of(node)
    os.kill(first, signal.SIGKILL)
    until(lambda: node.agent.get("/v1/node").json()["agent"]["watchdog_pid"] not in (None, first), "a new watchdog")
    node.agent._pids.add(watchdog_of(node))


def test_asked_to_end_it_takes_back_first_and_leaves_nobody_behind(node: Node) -> None:
    node.agent.start("--allow-faults")
    watchdog = watchdog_of(node)
    node.agent.inject(kind="link-down", nic="rail0", duration_s=600)
    assert node.agent.stop() == 0
    assert node.up()
    assert ended(watchdog)
    assert not node.agent.socket.exists()


def test_the_time_is_up_and_the_node_shows_all_of_it(node: Node) -> None:
    node.agent.start("--allow-faults")
    seen: dict[str, Any] = {}
    fault: dict[str, Any] = {}
    for duration_s in (3, 10, 60):  # on a busy machine it may be over before it was looked at
        fault = node.agent.inject(kind="link-down", nic="rail0", duration_s=duration_s, reason="drill")
        assert fault["state"] == "active"
        assert fault["owner"] == "the-chaos"
        assert 0 < fault["ttl_left_s"] <= duration_s
        assert fault["undo"][0] == "ip link set rail0 up"

        def shown_or_over() -> bool:
            seen.update(node.agent.get("/v1/node").json())
            return bool(rail0_in(seen)["injected"]) or node.up()

        until(shown_or_over, "the NIC is shown as injected")
        if rail0_in(seen)["injected"]:
            break
    assert f"down by fault {fault['id']}" in rail0_in(seen)["reason"]
    assert [p["object"] for p in seen["problems"]] == ["node1/rail0"]
    assert f"ftctl revert {fault['id']}" in seen["problems"][0]["action"]
    until(node.up, "the link is up again")
    until(
        lambda: rail0_in(node.agent.get("/v1/node").json())["state"] == "healthy",
        "the NIC is healthy, and not called flapping",
    )
    kinds = [e["kind"] for e in node.agent.get("/v1/events").json()["events"]]
    for kind in ("fault.active", "rail.down", "fault.reverted", "rail.up"):
        assert kind in kinds
    rail_down = next(e for e in node.agent.get("/v1/events").json()["events"] if e["kind"] == "rail.down")
    assert rail_down["injected"]


def rail0_in(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(n for n in document["nics"] if n["name"] == "rail0")
    return found


def test_refused_by_the_guards_of_a_real_node(node: Node) -> None:
    node.agent.start("--allow-faults")
    first = node.agent.inject(kind="link-down", nic="rail0", duration_s=60)
    again = node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail0"})
    assert (again.status_code, again.json()["code"]) == (409, "refused")
    assert first["id"] in again.json()["reason"]
    last = node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail1"})
    assert "last healthy rail" in last.json()["reason"]
    assert node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail7"}).json()["code"] == "unknown-nic"
    everything = node.agent.post("/v1/faults/revert-all")
    assert [f["state"] for f in everything.json()["faults"]] == ["reverted"]
    assert node.up()
    node.ipr.link("set", index=node.rail0, state="down")
    by_itself = node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail0"})
    assert "down already, and not by a fault of ours" in by_itself.json()["reason"]


def test_a_full_disk_under_the_ledger_refuses_the_fault(node: Node) -> None:
    """A real file system without a byte left."""
    ledger = node.agent.state / "ledger"
    ledger.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(ledger)], check=False)
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        node.agent.start("--allow-faults")
        try:
            with (ledger / "fill").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        except OSError:
            pass
        refused = node.agent.post("/v1/faults", {"kind": "link-down", "nic": "rail0"})
        assert (refused.status_code, refused.json()["code"]) == (507, "ledger")
        assert "nothing was injected" in refused.json()["reason"]
        assert node.up()
        (ledger / "fill").unlink()
        node.agent.inject(kind="link-down", nic="rail0", duration_s=60)
        assert node.agent.stop() == 0
        assert node.up()
    finally:
        subprocess.run(["umount", "-l", str(ledger)], check=True)
