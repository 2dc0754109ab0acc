"""A halt takes faults back, refuses new ones with who, why and the way out, and outlives its agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live_agent import live_agent

from agents.halt import Halt
from agents.problems import ApiProblem


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def __call__(self, kind: str, thing: str, reason: str) -> None:
        self.events.append((kind, thing, reason))


def test_who_was_first_stays_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "state" / "halt.json"
    halt = Halt(path, "node1", told, clock=lambda: 0.0)
    assert halt.why() == ""
    assert not halt.clear("ann", "nothing to do")
    changed, view = halt.hold("ann", "real\nincident")
    halt.save(view)
    assert (changed, view.by, view.reason) == (True, "ann", "real incident")
    assert halt.hold("bob", "me too") == (False, view)
    again = Halt(path, "node1", told)
    assert again.view() == view
    assert again.why() == "faults are halted on node1 by ann since 1970-01-01T00:00:00Z: real incident"
    assert path.stat().st_mode & 0o777 == 0o600
    assert again.clear("bob", "over")
    assert Halt(path, "node1", told).view() is None
    assert [event[0] for event in told.events] == ["faults.halted", "faults.allowed"]


def test_a_halt_that_crosses_an_allow_stands(tmp_path: Path) -> None:
    path = tmp_path / "halt.json"
    halt = Halt(path, "node1", Told())
    _changed, view = halt.hold("ann", "incident")
    halt.clear("bob", "over")
    halt.save(view)
    assert halt.view() == view
    assert Halt(path, "node1", Told()).view() == view


@pytest.mark.parametrize("content", [b"", b"{", b'{"by": "ann"}', b"[1]", b'{"by":"a","reason":"r","since":1,"x":2}'])
def test_a_damaged_record_counts_as_a_halt_until_somebody_allows(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "halt.json"
    path.write_bytes(content)
    halt = Halt(path, "node1", Told())
    assert "damaged" in halt.why()
    assert halt.clear("ann", "looked at it")
    assert not path.exists()


def test_a_disk_that_takes_nothing_halts_for_now_and_says_so(tmp_path: Path) -> None:
    halt = Halt(tmp_path / "state" / "halt.json", "node1", Told())
    (tmp_path / "state").write_text("a file where the directory should be")
    _changed, view = halt.hold("ann", "incident")
    with pytest.raises(ApiProblem, match="only until its agent ends"):
        halt.save(view)
    assert halt.view() == view
    with pytest.raises(ApiProblem, match="still halted"):
        halt.clear("ann", "over")
    assert halt.view() == view


def test_an_agent_that_was_halted_injects_nothing_over_its_own_death() -> None:
    noop: dict[str, Any] = {"kind": "noop", "duration_s": 60}
    with live_agent() as agent:
        agent.start("--allow-faults")
        fault = agent.post("/v1/faults", noop, role="chaos").json()
        assert fault["state"] == "active"
        assert agent.post("/v1/faults/halt", {"reason": "x"}, role="viewer").status_code == 403
        for wrong in ({"reason": " "}, {}, {"reason": "x", "what": 1}, {"reason": 3}):
            assert agent.post("/v1/faults/halt", wrong, role="operator").status_code == 422
        assert agent.get(f"/v1/faults/{fault['id']}").json()["state"] == "active", "a wrong request does nothing"
        done = agent.post("/v1/faults/halt", {"reason": "incident"}, role="operator").json()
        assert (done["changed"], done["halt"]["by"]) == (True, "the-operator")
        assert [(f["id"], f["state"]) for f in done["faults"]] == [(fault["id"], "reverted")]
        again = agent.post("/v1/faults/halt", {"reason": "me too"}, role="operator").json()
        assert (again["changed"], again["halt"]["reason"], again["faults"]) == (False, "incident", [])
        agent.kill()
        agent.start("--allow-faults")
        assert agent.get("/v1/node").json()["halt"]["reason"] == "incident"
        assert "ftctl_faults_halted 1.0" in agent.get("/metrics").text
        for wish in (noop, {**noop, "dry_run": True}):
            refused = agent.post("/v1/faults", wish, role="chaos")
            assert refused.status_code == 409
            assert "halted on node1 by the-operator since 2" in refused.json()["reason"]
            assert refused.json()["hint"] == "ftctl faults allow --reason TEXT"
        assert agent.post("/v1/faults/allow", {"reason": "over"}, role="operator").json()["changed"]
        assert agent.post("/v1/faults", noop, role="chaos").json()["state"] == "active"
