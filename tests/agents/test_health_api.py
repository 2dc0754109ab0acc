"""Verdicts over the API of a real agent: foreign ones, clearing, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_agent import LiveAgent, live_agent


@pytest.fixture(scope="module")
def agent() -> Iterator[LiveAgent]:
    with live_agent(rails=["rail-gone"]) as one:
        yield one.start()


def said(**change: Any) -> dict[str, Any]:
    base = {"kind": "gpu", "object": "gpu 3", "code": "xid.79", "health": "unhealthy", "reason": "fell off the bus"}
    return {**base, **change}


def post(agent: LiveAgent, *verdicts: dict[str, Any], source: str = "gpud", **more: Any) -> list[str]:
    response = agent.post("/v1/verdicts", {"source": source, "verdicts": list(verdicts), **more}, "operator")
    assert response.status_code == 200, response.text
    incidents: list[str] = response.json()["incidents"]
    return incidents


def verdicts(agent: LiveAgent, kind: str = "gpu") -> list[dict[str, Any]]:
    answer = agent.get("/v1/health", "viewer").json()
    return [v for v in answer["verdicts"] if v["kind"] == kind and v["code"]]


def test_a_missing_rail_is_a_verdict_a_problem_and_the_state_of_its_view(agent: LiveAgent) -> None:
    (verdict,) = verdicts(agent, "nic")
    assert (verdict["object"], verdict["health"], verdict["code"]) == ("nic rail-gone", "unhealthy", "nic.missing")
    node = agent.get("/v1/node").json()
    view = next(nic for nic in node["nics"] if nic["name"] == "rail-gone")
    assert (view["state"], view["reason"]) == (verdict["health"], verdict["reason"])
    problem = {"object": "node1/rail-gone", "reason": verdict["reason"], "action": verdict["hint"], "in_force": False}
    assert problem in node["problems"]
    event = next(e for e in agent.get("/v1/events").json()["events"] if e["kind"] == "rail.down")
    told = (event["incident"], event["node"], event["verdict"], event["action"])
    assert told == (verdict["incident"], "node1", "unhealthy", "check")


def test_other_monitors_are_heard_and_take_back_their_own_words(agent: LiveAgent) -> None:
    first = post(agent, said(evidence=["NVRM: Xid (PCI:0000:04:00): 79"]))
    second = post(agent, said(code="dbe", reason="double-bit errors"), source="dcgm")
    assert first == second  # one GPU, one incident
    found = {v["source"]: v for v in verdicts(agent)}
    assert found["gpud"]["evidence"] == ["NVRM: Xid (PCI:0000:04:00): 79"]
    assert found["gpud"]["action"] == "check"
    problem = next(p for p in agent.get("/v1/node").json()["problems"] if p["object"] == "node1/gpu3")
    assert problem["reason"] == "fell off the bus (says gpud)"
    assert post(agent, said(health="healthy", code=None, reason="")) == [""]
    assert [v["source"] for v in verdicts(agent)] == ["dcgm"]
    assert post(agent, source="dcgm", complete=True) == []
    assert verdicts(agent) == []
    closed = agent.get("/v1/health").json()["incidents"]
    assert next(i for i in closed if i["id"] == first[0])["codes"] == ["xid.79", "dbe"]
    events = [e for e in agent.get("/v1/events").json()["events"] if e["incident"] == first[0]]
    kinds = [e["kind"] for e in events if e["kind"].startswith("gpu.")]  # what the policy decides stands between
    assert kinds[:2] + kinds[-1:] == ["gpu.unhealthy", "gpu.unhealthy", "gpu.healthy"]


def test_an_operator_clears_what_would_stay(agent: LiveAgent) -> None:
    post(agent, said(object="gpu 5", ttl_s=0))
    answer = agent.post("/v1/clear", {"kind": "gpu", "object": "5", "reason": "replaced"}, "operator")
    assert answer.json()["cleared"] == 1
    assert verdicts(agent) == []
    event = [e for e in agent.get("/v1/events").json()["events"] if e["kind"].startswith("gpu.")][-1]
    assert (event["kind"], event["object"]) == ("gpu.healthy", "node1/gpu5")
    assert "cleared by the-operator: replaced" in event["reason"]


@pytest.mark.parametrize(
    ("path", "body", "role", "status", "says"),
    [
        ("/v1/verdicts", {"source": "gpud", "verdicts": []}, "viewer", 403, "operator"),
        ("/v1/verdicts", {"source": "gpud", "verdicts": [], "more": 1}, "operator", 422, "no such key"),
        ("/v1/verdicts", {"source": "ft-agent", "verdicts": []}, "operator", 422, "own name"),
        ("/v1/verdicts", {"source": "a b", "verdicts": []}, "operator", 422, "pattern"),
        ("/v1/verdicts", {"source": "gpud", "verdicts": [said()] * 257}, "operator", 422, "256"),
        ("/v1/verdicts", {"source": "gpud", "verdicts": [said(health="sad")]}, "operator", 422, "healthy"),
        ("/v1/verdicts", {"source": "gpud", "verdicts": [said(reason="x" * 501)]}, "operator", 422, "500"),
        ("/v1/verdicts", {"source": "gpud", "verdicts": [said(ttl_s=-1)]}, "operator", 422, "0"),
        ("/v1/clear", {"kind": "nic", "object": "rail7", "reason": "x"}, "operator", 404, "known: nic"),
        ("/v1/clear", {"kind": "nic", "object": "rail-gone", "reason": "  "}, "operator", 422, "reason is required"),
        ("/v1/clear", {"kind": "nic", "object": "rail-gone", "reason": "x"}, "viewer", 403, "operator"),
    ],
)
def test_what_is_refused(agent: LiveAgent, path: str, body: Any, role: str, status: int, says: str) -> None:
    response = agent.post(path, body, role)
    assert response.status_code == status
    assert says in response.text


def test_the_number_of_monitors_and_of_their_words_is_bounded(agent: LiveAgent) -> None:
    assert len(post(agent, *[said(object=f"gpu {n}", ttl_s=1) for n in range(200)], source="dcgm")) == 200
    more = {"source": "dcgm", "verdicts": [said(object=f"gpu {n}") for n in range(200, 300)]}
    response = agent.post("/v1/verdicts", more, "operator")
    assert response.status_code == 422
    assert "256 are kept" in response.text
    answers = [agent.post("/v1/verdicts", {"source": f"m{n}", "verdicts": []}, "operator") for n in range(20)]
    assert [a.status_code for a in answers].count(200) <= 16
    assert "are heard already" in answers[-1].text
    post(agent, source="dcgm", complete=True)
