"""A fault that would cut an agent off from those who could take it back is refused, or taken back without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_network import Namespace, add_rail, needs_root
from certificates import certificate
from fake_links import FakeClock, FakeLinks, address
from live_agent import TOKENS, live_agent
from pyroute2 import IPRoute

from agents.api.words import FaultState
from agents.host.machine import Machine
from agents.injection.deadlines import Deadlines
from agents.injection.guard import CUT_OFF_S, Limits
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Ledger
from agents.injection.problems import FaultProblem
from agents.injection.reverting import Reverter


def injector(machine: Machine, directory: Path, listen: str | None) -> Injector:
    ledger = Ledger(directory)
    limits = Limits("node1", ("rail0", "rail1"), None, max_faults=3, max_duration_s=900, listen=listen)
    reverter = Reverter(ledger, machine, sleep=lambda _s: None)
    made = Injector(ledger, machine, limits, lambda *e: None, reverter=reverter)
    made.start()
    return made


def wish(kind: str = "link-down", nic: str = "rail0", **more: Any) -> Injection:
    return Injection(kind, "ann", 300.0, nic=nic, allow_last_rail=True, dry_run=True, **more)


@pytest.mark.parametrize(
    ("listen", "asked", "words"),
    [
        ("10.0.0.1", wish(), "rail0 has 10.0.0.1, at which this agent is reached"),
        ("10.0.0.1", wish(nic="rail1"), ""),
        ("10.0.0.1", wish(kind="node-down", nic=""), "rail0 has 10.0.0.1"),
        ("10.0.0.1", wish(kind="link-loss", params={"percent": 5.0}), ""),  # it stays reachable
        ("10.0.0.1", wish(via="10.0.0.1", override=("cut_off",), reason="drill"), ""),
        ("0.0.0.0", wish(), ""),  # over a Unix socket: whoever asks is on the node
        ("0.0.0.0", wish(via="10.0.0.1"), "rail0 has 10.0.0.1"),
        ("0.0.0.0", wish(via="10.9.9.1"), ""),
        ("::", wish(via="fd00::1"), "rail0 has fd00::1"),
        ("127.0.0.1", wish(via="127.0.0.1"), ""),
        (None, wish(), ""),
        (
            "10.9.9.1",
            wish(kind="partition", nic="", client="10.0.0.7", params={"peers": "10.0.0.6, 10.0.0.7"}),
            "10.0.0.7, from where this is asked, would be cut off from node1",
        ),
        ("10.0.0.1", wish(kind="partition", nic="", client="10.0.0.7", params={"peers": "10.0.0.6"}), ""),
    ],
)
def test_which_faults_cut_the_agent_off(
    machine: Machine, links: FakeLinks, ledger_directory: Path, listen: str | None, asked: Injection, words: str
) -> None:
    links.addrs[2] = [address("10.0.0.1/24"), address("fd00::1/64")]
    made = injector(machine, ledger_directory, listen)
    if not words:
        assert made.inject(asked).state is FaultState.ARMED
        return
    with pytest.raises(FaultProblem) as caught:
        made.inject(asked)
    assert words in caught.value.reason
    assert caught.value.code == "refused"
    assert "--override cut_off" in caught.value.hint


def test_with_an_override_it_goes_when_nobody_was_heard(
    machine: Machine, links: FakeLinks, clock: FakeClock, ledger_directory: Path
) -> None:
    links.addrs[2] = [address("10.0.0.1/24")]
    made = injector(machine, ledger_directory, "10.0.0.1")
    deadlines = Deadlines(made, lambda *e: None, "node1")
    asked = {"nic": "rail0", "override": ("cut_off",), "reason": "drill"}
    fault = made.inject(Injection("link-down", "ann", 300.0, **asked))  # type: ignore[arg-type]
    assert fault.dead_man_s == CUT_OFF_S
    clock.boot += CUT_OFF_S - 1
    deadlines.tick()
    assert not links.devices[2].up
    clock.boot += 2
    deadlines.tick()
    assert links.devices[2].up, "long before its 300 s are over"
    shorter = made.inject(Injection("link-down", "ann", 300.0, dead_man_s=2.0, **asked))  # type: ignore[arg-type]
    assert shorter.dead_man_s == 2.0


@pytest.mark.root
@needs_root
@pytest.mark.timeout(300)
def test_an_agent_that_is_reached_over_a_rail(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            for number, name in enumerate(("rail0", "rail1")):
                add_rail(ipr, name, number)
            with live_agent(
                listen="10.77.0.1:0", tls_cert=str(cert), tls_key=str(key), rails=["rail0", "rail1"]
            ) as agent:
                agent.start("--allow-faults")
                started = next(e for e in agent.get("/v1/events").json()["events"] if e["kind"] == "agent.started")
                at = started["reason"].split("listens on ")[1].split(",")[0]
                headers = {"Authorization": f"Bearer {TOKENS['chaos']}"}
                with httpx.Client(base_url=f"https://{at}", headers=headers, verify=False, timeout=90) as client:
                    down = {"kind": "link-down", "nic": "rail0", "dry_run": True}
                    refused = client.post("/v1/faults", json=down)
                    assert refused.status_code == 409, refused.text
                    assert "rail0 has 10.77.0.1, at which this agent is reached" in refused.json()["reason"]
                    assert client.post("/v1/faults", json={**down, "nic": "rail1"}).status_code == 200
                    lifted = {**down, "override": ["cut_off"], "reason": "drill"}
                    assert client.post("/v1/faults", json=lifted).status_code == 200
                    peers = {"kind": "partition", "params": {"peers": "10.77.0.200"}, "dry_run": True}
                    assert client.post("/v1/faults", json=peers).status_code == 200
    finally:
        namespace.close()
