"""The contract that the agent publishes is the one that it keeps: requests made from /openapi.json by Schemathesis,
good and bad ones, at a real agent in a namespace of its own, with faults allowed and without.

SCHEMA_EXAMPLES=N: so many requests of each kind for each operation, others each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from agent_network import Namespace, add_rail, needs_root, settled
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_agent import TOKENS, LiveAgent, live_agent
from pyroute2 import IPRoute

from agents.api.faultspecs import SPECS, Param
from agents.api.models import ERROR_CODES, ErrorBody

schemathesis = pytest.importorskip("schemathesis", reason="pip install 'schemathesis>=4.32' (the extra [test] has it)")
openapi = pytest.importorskip("schemathesis.openapi")

pytestmark = [pytest.mark.root, needs_root]

WANTED = os.environ.get("SCHEMA_EXAMPLES", "")
# They end the agent, or take the machine's memory or disk.
NOT_FOR_REAL = ("agent-kill", "mem-hog", "disk-full")
# What a machine may lack, or a job that the agent has not; never a bug.
EXPLAINED = ("unsupported", "coordinator")


@contextmanager
def _agent(*arguments: str) -> Iterator[LiveAgent]:
    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            settled(ipr, add_rail(ipr, "rail0", 0))
            settled(ipr, add_rail(ipr, "rail1", 1))
            with live_agent(
                listen="127.0.0.1:7610", rails=["rail0", "rail1"], max_duration_s=30, default_duration_s=5
            ) as agent:
                yield agent.start(*arguments)
    finally:
        namespace.close()


def _value(param: Param) -> st.SearchStrategy[Any]:
    """In its bounds, mostly."""
    if param.choices:
        return st.sampled_from([*param.choices, "neither"])
    if param.type in ("int", "float"):
        low, high = param.minimum or 0, min(param.maximum or 1000, 1000)
        return st.integers(int(low), int(high)) if param.type == "int" else st.floats(low, high)
    return st.sampled_from(["10.0.0.2", "10.77.0.2, fd77::2", "", "x"])


HIT = {"id": "f-1", "node": "n2", "replicas": ["r2"]}
SAFETY: list[dict[str, Any]] = [
    {"override": ["nodes_percent", "nodes_percent"], "reason": "drill"},
    {"override": ["cut_off"]},
    {"override": ["gravity"], "reason": "drill"},
    {"protect": {"source": "b.yaml", "nics": ["rail1"], "replicas": ["r*"]}},
    {"protect": {"nics": ["a b"]}},
    {"fleet": {"nodes": 2, "hits": [HIT] * 9, "silent": ["n3"]}, "override": ["faults"], "reason": "drill"},
    {"fleet": {"nodes": -1}},
    {"blast": {"source": "b.yaml", "faults": 1, "same_replica": True}},
    {"blast": {"source": "", "faults": 0}},
]


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    """Faults as somebody may mean them; texts and numbers at random hardly ever come to one."""
    spec = SPECS[draw(st.sampled_from(sorted(SPECS)))]
    wish: dict[str, Any] = {"kind": spec.kind, "duration_s": draw(st.sampled_from([5.0, 2.0, 30.0, 0.5, 0.0, 31.0]))}
    wish["params"] = {p.name: draw(_value(p)) for p in spec.params if p.default is None or draw(st.booleans())}
    if spec.target == "nic" or draw(st.integers(0, 9)) == 7:
        wish["nic"] = draw(st.sampled_from(["rail0", "rail0", "rail1", "rail7", "lo", ""]))
    if spec.target == "replica" or draw(st.integers(0, 9)) == 7:
        wish["replica"] = draw(st.sampled_from(["r1", "", "R 1"]))
    for name in ("allow_last_rail", "allow_last_replica"):
        wish[name] = draw(st.booleans())
    wish |= draw(st.sampled_from([{}, {}, {}, *SAFETY]))
    wish["dry_run"] = spec.kind in NOT_FOR_REAL or draw(st.integers(0, 3)) == 3
    wish["dead_man_s"] = draw(st.sampled_from([None, 2.0, 1.0, 0.5, 60.0]))
    return wish


def _explained(_context: Any, response: Any, _case: Any) -> None:
    """What is an error is an ErrorBody with a code of ours and the status that belongs to it; none is a bug."""
    if response.status_code < 400:
        return
    body = ErrorBody.model_validate_json(response.content)
    assert body.code in ERROR_CODES, body
    if body.code != "bad-request":  # of a body that is too large, or too slow, too
        assert ERROR_CODES[body.code][0] == response.status_code or response.status_code == 405, body
    assert response.status_code < 500 or body.code in EXPLAINED, body
    assert body.thing, body
    assert body.reason, body


def _run(agent: LiveAgent, examples: int, under: str = "/") -> dict[int, int]:
    """Every operation there, with good requests and with bad ones. How often each status came."""
    schema = openapi.from_dict(agent.get("/openapi.json").json())
    headers = {"Authorization": f"Bearer {TOKENS['chaos']}"}
    checks = [
        schemathesis.checks.not_a_server_error,
        *(_check(name) for name in ("status_code_conformance", "content_type_conformance")),
        _check("response_schema_conformance"),
    ]
    statuses: dict[int, int] = {}
    how = settings(
        max_examples=examples,
        derandomize=not WANTED,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )

    def ask(case: Any) -> None:
        if "wait_s" in (case.query or {}):
            case.query["wait_s"] = 0 if isinstance(case.query["wait_s"], int | float) else case.query["wait_s"]
        if case.meta is None or case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE:
            for name in [name for name in case.headers or {} if name.lower() == "authorization"]:
                del case.headers[name]  # a guessed token: the good one is ours
        response = case.call(base_url="http://127.0.0.1:7610", headers=headers, timeout=30)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        explained = response.status_code < 500
        _explained(None, response, case)
        case.validate_response(response, checks=checks if explained else checks[1:])

    for found in schema.get_all_operations():
        operation = found.ok()
        if not operation.path.startswith(under):
            continue
        modes = schemathesis.GenerationMode
        asks = bool(operation.body) or any(True for _ in operation.iter_parameters())
        for mode in (modes.POSITIVE, modes.NEGATIVE) if asks else (modes.POSITIVE,):
            _through(operation.as_strategy(generation_mode=mode), ask, how)
        if (operation.method.upper(), operation.path) == ("POST", "/v1/faults"):
            _through(operation.as_strategy().flatmap(_with_a_wish), ask, settings(how, max_examples=10 * examples))
        agent.post("/v1/faults/revert-all")
    return statuses


def _with_a_wish(case: Any) -> st.SearchStrategy[Any]:
    def put(wish: dict[str, Any]) -> Any:
        case.body = wish
        return case

    return wishes().map(put)


def _through(strategy: st.SearchStrategy[Any], ask: Callable[[Any], None], how: settings) -> None:
    @how
    @given(strategy)
    def all_of_them(case: Any) -> None:
        ask(case)

    all_of_them()


def _check(name: str) -> Any:
    from schemathesis.specs.openapi import checks

    return getattr(checks, name)


@pytest.mark.timeout(0 if WANTED else 600)
@pytest.mark.parametrize("arguments", [("--allow-faults",), ()], ids=["faults", "no-faults"])
def test_every_answer_is_as_the_contract_says(arguments: tuple[str, ...]) -> None:
    with _agent(*arguments) as agent:
        statuses = _run(agent, int(WANTED or 3), "/" if arguments else "/v1/fault")
        assert agent.process is not None
        assert agent.process.poll() is None, agent.text()
        assert "a bug in the agent" not in agent.text()
        assert "Traceback" not in agent.text()
        assert {200, 404, 422, *((409,) if arguments else (403,))} <= set(statuses), statuses
        agent.post("/v1/faults/allow", {"reason": "test"})
        if arguments:
            assert agent.inject(kind="noop", duration_s=1)["state"] == "active"
        assert agent.stop() == 0
