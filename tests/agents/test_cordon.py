"""A node that is set apart starts nothing, says why, and is still set apart after its agent was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live_agent import LiveAgent, live_agent, until

from agents.cordon import Cordon
from agents.problems import ApiProblem

PROGRAMS = Path(__file__).parent / "recovery" / "programs"


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def __call__(self, kind: str, thing: str, reason: str) -> None:
        self.events.append((kind, thing, reason))


def test_who_was_first_stays_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    told = Told()
    cordon = Cordon(tmp_path / "state" / "cordon.json", "node1", told, clock=lambda: 1000.0)
    assert cordon.why() == ""
    assert not cordon.clear("ann", "nothing to do")
    assert cordon.set("ann", "bad\noptic", dry_run=True)[0]
    assert cordon.view() is None, "a dry run changes nothing"
    changed, view = cordon.set("ann", "bad\noptic")
    assert (changed, view.by, view.reason, view.since) == (True, "ann", "bad optic", 1000.0)
    changed, view = cordon.set("bob", "me too")
    assert (changed, view.by) == (False, "ann")
    again = Cordon(tmp_path / "state" / "cordon.json", "node1", told)
    assert again.view() == view
    assert again.why() == "node1 is cordoned by ann: bad optic"
    with pytest.raises(ApiProblem) as refused:
        again.refuse("replica r1")
    assert (refused.value.body.code, refused.value.body.hint) == ("refused", "ftctl uncordon node node1")
    assert again.clear("bob", "replaced")
    assert Cordon(tmp_path / "state" / "cordon.json", "node1", told).view() is None
    assert told.events == [
        ("node.cordoned", "node1", "by ann: bad optic"),
        ("node.uncordoned", "node1", "by bob: replaced"),
    ]


@pytest.mark.parametrize("content", [b"", b"{", b'{"by": "ann"}', b"[1]", b'{"by":"a","reason":"r","since":1,"x":2}'])
def test_a_damaged_record_counts_as_a_cordon_until_somebody_takes_it_away(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cordon.json"
    path.write_bytes(content)
    cordon = Cordon(path, "node1", Told())
    assert "damaged" in cordon.why()
    assert cordon.clear("ann", "looked at it")
    assert not path.exists()


def test_a_disk_that_takes_nothing_means_not_cordoned(tmp_path: Path) -> None:
    told = Told()
    cordon = Cordon(tmp_path / "state" / "cordon.json", "node1", told)
    (tmp_path / "state").write_text("a file where the directory should be")
    with pytest.raises(ApiProblem, match="not cordoned"):
        cordon.set("ann", "optic")
    assert (cordon.view(), told.events) == (None, [])


def process(agent: LiveAgent) -> dict[str, Any]:
    found: dict[str, Any] = agent.get("/v1/node").json()["processes"][0]
    return found


def test_a_cordoned_agent_starts_no_replica_over_its_own_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    replicas = [{"replica": "r1", "module": "sample_replica", "args": ["sleep"]}]
    with live_agent(supervision={"replicas": replicas, "grace_s": 1.0, "backoff_max_s": 0.2}) as agent:
        agent.start("--stop-replicas")
        until(lambda: process(agent)["state"] == "running", "r1 runs")
        first = process(agent)["pid"]
        try:
            assert agent.post("/v1/node/cordon", {"reason": "optic"}, role="viewer").status_code == 403
            assert agent.post("/v1/node/cordon", {"reason": " "}, role="operator").status_code == 422
            assert agent.post("/v1/node/cordon", {"reason": "x", "what": 1}, role="operator").status_code == 422
            answer = agent.post("/v1/node/cordon", {"reason": "bad optic"}, role="operator").json()
            assert (answer["changed"], answer["cordon"]["by"]) == (True, "the-operator")
            assert process(agent)["pid"] == first, "what runs goes on"
            agent.kill()
            agent.start("--stop-replicas")
            assert agent.get("/v1/node").json()["cordon"]["reason"] == "bad optic"
            assert "ftctl_node_cordoned 1.0" in agent.get("/metrics").text
            os.kill(first, signal.SIGKILL)
            until(lambda: process(agent)["state"] == "starting", "r1 waits")
            assert process(agent)["reason"] == "node1 is cordoned by the-operator: bad optic"
            for verb in ("start", "restart", "rejoin"):
                refused = agent.post(f"/v1/replicas/r1/{verb}", {"reason": "try"}, role="operator")
                assert refused.status_code == 409
                assert refused.json()["hint"] == "ftctl uncordon node node1"
            refused = agent.post("/v1/job/replicas/r1/rejoin", {"reason": "try"}, role="operator")
            assert (refused.status_code, refused.json()["code"]) == (409, "refused")
            assert process(agent)["pid"] is None
            answer = agent.post("/v1/node/uncordon", {"reason": "replaced"}, role="operator").json()
            assert answer == {"changed": True, "cordon": None}
            until(lambda: process(agent)["state"] == "running", "r1 runs again")
            assert "ftctl_node_cordoned 0.0" in agent.get("/metrics").text
        finally:
            assert agent.stop() == 0
