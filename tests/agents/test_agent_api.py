"""The agent's HTTP contract, asked over its real sockets: who may what, bad input, limits, events, metrics."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_agent import TOKENS, LiveAgent, live_agent, until

from agents.api.models import ERROR_CODES, ErrorBody, FaultSpec, FaultView, NodeView


@pytest.fixture(scope="module")
def agent() -> Iterator[LiveAgent]:
    """One agent with faults allowed and no rails: noop is all that can be injected."""
    with live_agent(listen="127.0.0.1:0", max_faults=3) as agent:
        yield agent.start("--allow-faults")


@pytest.fixture(autouse=True)
def _no_faults_left(agent: LiveAgent) -> Iterator[None]:
    yield
    agent.post("/v1/faults/revert-all")


def problem(response: httpx.Response, status: int, code: str) -> ErrorBody:
    assert response.status_code == status, response.text
    body = ErrorBody.model_validate(response.json())
    assert body.code == code
    assert body.thing
    assert body.reason
    return body


def tcp_port(agent: LiveAgent) -> int:
    started = agent.get("/v1/events").json()["events"][0]["reason"]
    return int(started.split("127.0.0.1:")[1].split(",")[0])


# --- who may what -------------------------------------------------------------------------------------------------


def test_alive_is_told_to_anybody(agent: LiveAgent) -> None:
    assert agent.get("/healthz", role="nobody").json()["node"] == "node1"


def test_without_a_token_nothing_else_is_told(agent: LiveAgent) -> None:
    for path in ("/v1/node", "/v1/faults", "/v1/fault-kinds", "/v1/events", "/v1/job", "/metrics", "/openapi.json"):
        response = agent.get(path, role="nobody")
        problem(response, 401, "unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("token", ["x", "viewer-token-000", "viewer-token-00000", "\xff" * 20, "a" * 5000])
def test_a_wrong_token_is_refused(agent: LiveAgent, token: str) -> None:
    with agent.client("nobody") as client:
        response = client.get("/v1/node", headers={"Authorization": f"Bearer {token}".encode("latin-1")})
    problem(response, 401, "unauthorized")
    assert token == "x" or token not in response.text


ROLES: list[tuple[str, str, str, Any]] = [
    ("viewer", "GET", "/v1/node", None),
    ("viewer", "GET", "/v1/faults", None),
    ("viewer", "GET", "/v1/fault-kinds", None),
    ("viewer", "GET", "/v1/events", None),
    ("viewer", "GET", "/v1/links", None),
    ("viewer", "GET", "/v1/audit", None),
    ("viewer", "GET", "/v1/policy", None),
    ("viewer", "GET", "/v1/health", None),
    ("operator", "POST", "/v1/verdicts", {"source": "gpud", "verdicts": []}),
    ("operator", "POST", "/v1/policy/mode", {"mode": "observe", "reason": "test"}),
    ("operator", "POST", "/v1/clear", {"kind": "nic", "object": "none", "reason": "test"}),
    ("viewer", "GET", "/metrics", None),
    ("viewer", "GET", "/openapi.json", None),
    ("operator", "POST", "/v1/faults/revert-all", None),
    ("operator", "POST", "/v1/faults/f-none/revert", None),
    ("operator", "POST", "/v1/job/replicas/r1/drain", {"reason": "test"}),
    ("operator", "POST", "/v1/job/replicas/r1/evict", {"reason": "test"}),
    ("operator", "POST", "/v1/job/replicas/r1/rejoin", {"reason": "test"}),
    ("operator", "POST", "/v1/node/cordon", {"reason": "test", "dry_run": True}),
    ("operator", "POST", "/v1/node/uncordon", {"reason": "test"}),
    ("operator", "POST", "/v1/faults/halt", {"reason": "test"}),
    ("operator", "POST", "/v1/faults/allow", {"reason": "test"}),
    ("operator", "POST", "/v1/job/force-quorum", {"reason": "test"}),
    ("operator", "POST", "/v1/job/finish", {"reason": "test"}),
    ("operator", "POST", "/v1/replicas/r1/stop", {"reason": "test"}),
    ("operator", "POST", "/v1/replicas/r1/stacks", {}),
    ("chaos", "POST", "/v1/faults", {"kind": "noop", "dry_run": True}),
    ("chaos", "POST", "/v1/faults/f-none/keepalive", None),
]


@pytest.mark.parametrize(("needed", "method", "path", "body"), ROLES)
def test_every_route_asks_for_its_role(agent: LiveAgent, needed: str, method: str, path: str, body: Any) -> None:
    order = list(TOKENS)
    for role in order:
        with agent.client(role) as client:
            response = client.request(method, path, json=body)
        if order.index(role) < order.index(needed):
            refusal = problem(response, 403, "forbidden")
            assert role in refusal.reason
            assert needed in refusal.reason
        else:
            assert response.status_code != 403, response.text
    if path == "/v1/faults/halt":  # other tests inject on this agent
        with agent.client("operator") as client:
            assert client.post("/v1/faults/allow", json={"reason": "test"}).json()["halt"] is None


def test_the_table_above_names_every_route(agent: LiveAgent) -> None:
    paths = set(agent.get("/openapi.json").json()["paths"])
    covered = {path.replace("f-none", "{fault}").replace("/r1/", "/{replica}/") for _r, _m, path, _b in ROLES}
    covered = {path.replace("/{replica}/stop", "/{replica}/{verb}") for path in covered}
    rest = {"/healthz", "/v1/job", "/v1/job/events", "/v1/faults/{fault}"}
    assert paths == (covered - {"/openapi.json"}) | rest


# --- the view -----------------------------------------------------------------------------------------------------


def test_the_node_is_what_the_contract_says(agent: LiveAgent) -> None:
    body = agent.get("/v1/node", role="viewer").json()
    view = NodeView.model_validate(body)
    assert body["schema"] == 1
    assert view.name == "node1"
    assert view.agent.pid == agent.pid
    assert view.agent.allow_faults
    assert view.agent.watchdog_pid
    assert 0 < view.agent.rss_mb < 80
    assert view.gpus.devices or "no GPUs" in view.gpus.note or "not read yet" in view.gpus.note
    assert all(nic.name != "lo" for nic in view.nics)


def test_the_contract_is_published_and_complete(agent: LiveAgent) -> None:
    schema = agent.get("/openapi.json", role="viewer").json()
    assert schema["openapi"].startswith("3.1")
    names = set(schema["components"]["schemas"])
    assert {"NodeView", "FaultView", "InjectRequest", "ErrorBody", "JobState", "EventsAnswer"} <= names
    assert schema["components"]["schemas"]["InjectRequest"]["additionalProperties"] is False
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert "default" in operation["responses"], path
            assert path == "/healthz" or operation["security"], path


def test_metrics_are_prometheus_text(agent: LiveAgent) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    agent.inject(kind="noop", duration_s=60)
    response = agent.get("/metrics", role="viewer")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    active = [s.value for s in families["ftctl_faults"].samples if s.labels["state"] == "active"]
    assert active == [1.0]
    assert families["ftctl_agent_resident_bytes"].samples[0].value > 1e6


# --- faults -------------------------------------------------------------------------------------------------------


def test_a_rehearsal_from_inject_to_revert(agent: LiveAgent) -> None:
    kinds = {spec["kind"]: FaultSpec.model_validate(spec) for spec in agent.get("/v1/fault-kinds").json()}
    assert kinds["noop"].supported
    assert kinds["link-down"].target == "nic"
    fault = FaultView.model_validate(agent.inject(kind="noop", duration_s=60, reason="drill", request_id="req-77"))
    assert (fault.state.value, fault.owner, fault.target) == ("active", "the-chaos", "node1")
    assert agent.get("/v1/faults").json()[-1]["id"] == fault.id
    assert agent.get(f"/v1/faults/{fault.id}").json()["request_id"] == "req-77"
    answer = agent.post(f"/v1/faults/{fault.id}/revert", role="operator").json()
    assert [f["state"] for f in answer["faults"]] == ["reverted"]
    assert "by the-operator" in answer["faults"][0]["detail"]
    assert agent.post("/v1/faults/revert-all").json()["faults"] == []
    assert fault.id in [f["id"] for f in agent.get("/v1/node").json()["faults"]], "shown for a minute"


def test_two_clients_with_one_request_id_get_one_fault(agent: LiveAgent) -> None:
    answers: list[str] = []
    wish = {"kind": "noop", "duration_s": 60, "request_id": "req-race"}
    threads = [threading.Thread(target=lambda: answers.append(agent.inject(**wish)["id"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(answers) == 4
    assert len(set(answers)) == 1


def test_a_fault_lives_as_long_as_its_controller(agent: LiveAgent) -> None:
    fault = agent.inject(kind="noop", duration_s=60, dead_man_s=1)
    kept = agent.post(f"/v1/faults/{fault['id']}/keepalive").json()
    assert kept["ttl_left_s"] <= 1.0
    deadline = time.monotonic() + 90
    while agent.get(f"/v1/faults/{fault['id']}").json()["state"] != "reverted":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "silent" in agent.get(f"/v1/faults/{fault['id']}").json()["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"kind": "noop", "colour": "red"}, 422, "bad-request", "no such key"),
        ({}, 422, "bad-request", "is missing"),
        ({"kind": 7}, 422, "bad-request", "string"),
        ({"kind": "noop", "duration_s": "long"}, 422, "bad-request", "number"),
        ({"kind": "noop", "duration_s": 0}, 422, "bad-duration", "above 0"),
        ({"kind": "noop", "duration_s": 100000}, 422, "bad-duration", "too long"),
        ({"kind": "noop", "params": {"a": [1]}}, 422, "bad-request", "text, a number"),
        ({"kind": "noop", "params": {"a": 1}}, 422, "bad-request", "no parameter a"),
        ({"kind": "explode"}, 404, "unknown-kind", "no such fault"),
        ({"kind": "link-down", "nic": "rail7"}, 404, "unknown-nic", "rail7"),
        ({"kind": "link-down"}, 422, "bad-request", "needs a NIC"),
        ({"kind": "link-down", "nic": "../../etc"}, 404, "unknown-nic", "etc"),
    ],
)
def test_bad_wishes(agent: LiveAgent, body: Any, status: int, code: str, words: str) -> None:
    assert words in problem(agent.post("/v1/faults", body), status, code).reason


def test_what_is_not_known(agent: LiveAgent) -> None:
    problem(agent.get("/v1/faults/f-nope"), 404, "unknown-fault")
    problem(agent.post("/v1/faults/f-nope/revert"), 404, "unknown-fault")
    problem(agent.post("/v1/faults/f-nope/keepalive"), 404, "unknown-fault")
    problem(agent.get("/v2/node"), 404, "not-found")
    problem(agent.get("/docs"), 404, "not-found")
    problem(agent.post("/v1/node"), 405, "not-found")
    problem(agent.post("/v1/replicas/r1/stop", {"reason": "x"}), 404, "unknown-replica")
    problem(agent.post("/v1/job/replicas/R%201/drain", {"reason": "x"}), 404, "unknown-replica")


def test_no_more_than_allowed_at_once(agent: LiveAgent) -> None:
    for _ in range(3):
        agent.inject(kind="noop", duration_s=60)
    problem(agent.post("/v1/faults", {"kind": "noop"}), 409, "refused")


def test_a_reason_is_required_where_somebody_is_put_out(agent: LiveAgent) -> None:
    for verb in ("drain", "evict"):
        refusal = problem(agent.post(f"/v1/job/replicas/r1/{verb}", {"reason": " "}), 422, "bad-request")
        assert "reason" in refusal.reason
    problem(agent.post("/v1/job/force-quorum", {"reason": ""}), 422, "bad-request")


def test_without_a_coordinator_the_job_routes_say_so(agent: LiveAgent) -> None:
    refusal = problem(agent.get("/v1/job"), 404, "no-coordinator")
    assert "knows no coordinator" in refusal.reason
    assert "coordinator" in refusal.hint


def test_every_code_has_a_status_and_an_exit_code() -> None:
    for code, (status, exit_code) in ERROR_CODES.items():
        assert 400 <= status < 600, code
        assert exit_code in (1, 2, 5, 7), code


# --- strangers ----------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_not_read(agent: LiveAgent) -> None:
    with agent.client() as client:
        refused = client.post("/v1/faults", content=b"x" * 70_000, headers={"Content-Type": "application/json"})
        problem(refused, 413, "bad-request")

        def chunks() -> Iterator[bytes]:
            for _ in range(100):
                yield b"x" * 1000

        problem(client.post("/v1/faults", content=chunks()), 413, "bad-request")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"kind": NaN}',
        b"[" * 20000,
        b'{"kind": "noop", "reason": "\\ud800"}',
        b'{"kind": "noop", "params": {"\\udfff": 1}}',
    ],
)
def test_a_body_that_is_no_wish(agent: LiveAgent, body: bytes) -> None:
    with agent.client() as client:
        response = client.post("/v1/faults", content=body, headers={"Content-Type": "application/json"})
    problem(response, 422, "bad-request")


def test_junk_and_silence_on_the_port_disturb_nobody(agent: LiveAgent) -> None:
    port = tcp_port(agent)
    junk = [b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET " + b"a" * 100_000, b"SSH-2.0-x\r\n\r\n"]
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(20)]
    for data in junk:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            try:
                sock.sendall(data)
                sock.recv(4096)
            except (ConnectionError, TimeoutError):
                pass
    assert agent.get("/healthz").status_code == 200
    response = httpx.get(f"http://127.0.0.1:{port}/v1/node", headers={"Authorization": f"Bearer {TOKENS['viewer']}"})
    assert response.status_code == 200
    for sock in silent:
        sock.close()


def test_what_strangers_send_does_not_fill_the_log(agent: LiveAgent) -> None:
    before, begun = agent.text().count("Invalid HTTP"), time.monotonic()
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", tcp_port(agent)), timeout=60) as sock:
            sock.sendall(b"\x16\x03\x01\r\n\r\n")
            sock.recv(4096)
    told = agent.text().count("Invalid HTTP") - before
    assert told <= time.monotonic() - begun + 1


def test_unfinished_headers_are_dropped_after_a_while(agent: LiveAgent) -> None:
    with socket.create_connection(("127.0.0.1", tcp_port(agent)), timeout=90) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert sock.recv(4096) == b"", "the server closes"


# --- events -------------------------------------------------------------------------------------------------------


def test_events_are_numbered_and_waited_for(agent: LiveAgent) -> None:
    before = agent.get("/v1/events?limit=1000").json()
    assert before["boot"]
    assert [e["seq"] for e in before["events"]] == list(range(1, before["last"] + 1))
    answers: list[dict[str, Any]] = []
    url = f"/v1/events?after={before['last']}&wait_s=30"
    waiter = threading.Thread(target=lambda: answers.append(agent.get(url, role="viewer").json()))
    waiter.start()
    agent.inject(kind="noop", duration_s=60)
    waiter.join(90)
    assert answers[0]["events"][0]["kind"] == "fault.active"
    assert answers[0]["events"][0]["injected"]
    assert answers[0]["events"][0]["seq"] == before["last"] + 1


def test_waiting_ends_and_a_number_from_another_life_is_answered_at_once(agent: LiveAgent) -> None:
    last = agent.get("/v1/events").json()["last"]
    assert agent.get(f"/v1/events?after={last}&wait_s=0.2").json()["events"] == []
    answer = agent.get("/v1/events?after=99999&wait_s=30").json()
    assert answer["last"] < 99999
    for query in ("after=-1", "limit=0", "limit=5000", "wait_s=31", "wait_s=nan", "after=x"):
        problem(agent.get(f"/v1/events?{query}"), 422, "bad-request")


def test_events_are_on_disk_too(agent: LiveAgent) -> None:
    agent.inject(kind="noop", duration_s=60)
    path = agent.state / "events.jsonl"
    until(lambda: "fault.active" in path.read_text(), "the event is written")
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds[0] == "agent.started"
    assert "fault.active" in kinds
    assert path.stat().st_mode & 0o077 == 0
    assert not any(token in path.read_text() + agent.text() for token in TOKENS.values()), "no secrets in logs"
