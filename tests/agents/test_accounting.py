"""/metrics of the agents: where the job's time went, as counters that add up, and never at the price of the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agents.http import node_routes
from agents.http.context import SharedRead
from agents.http.metrics import JobCheckpoints, JobTime
from agents.job import job_state
from agents.problems import ApiProblem
from ftar_core.protocol.config import JobConfig
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.protocol.record import Claim
from ftar_core.wire.accounting import AccountView, Category, Loss, Spent
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import CheckpointView, OpReply

SPENT = (
    Spent(category=Category.PRODUCTIVE, us=97_000_001, count=480),
    Spent(category=Category.STALLED, cause=Loss.KILLED, us=2_000_000, count=3),
    Spent(category=Category.DEGRADED, cause=Loss.KILLED, us=999_999, count=20),
)
ACCOUNT = AccountView(since=1.0, total_us=100_000_000, spent=SPENT, calm_us=200_000)
REPLY = OpReply(id=1, code="ok", text="", accounting=ACCOUNT)


def test_the_counters_add_up_and_name_category_and_cause() -> None:
    registry = CollectorRegistry()
    registry.register(JobTime("llm", ACCOUNT))
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    assert families["ftar_effective_training_ratio"].samples[0].value == pytest.approx(0.97, abs=1e-4)
    assert families["ftar_effective_training_ratio"].samples[0].labels == {"job": "llm"}
    assert families["ftar_calm_step_seconds"].samples[0].value == 0.2
    seconds = families["ftar_training_seconds"]
    assert (seconds.type, seconds.samples[0].name) == ("counter", "ftar_training_seconds_total")
    times = {(s.labels["category"], s.labels["cause"]): s.value for s in seconds.samples if s.name.endswith("_total")}
    assert times == {("productive", ""): 97.000001, ("stalled", "killed"): 2.0, ("degraded", "killed"): 0.999999}
    assert round(sum(times.values()), 6) == 100.0
    killed = [s.value for s in families["ftar_training_occasions"].samples if s.labels["category"] == "stalled"]
    assert killed[0] == 3.0


def checkpoints(view: CheckpointView) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(JobCheckpoints("llm", view, 1000.0))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    return {s.name: s.value for f in families for s in f.samples if not s.name.endswith("_created")}


def test_checkpoints_are_gauges_with_their_age_and_failures_are_counted() -> None:
    assert checkpoints(CheckpointView()) == {}, "a job without checkpoints says nothing about them"
    assert checkpoints(CheckpointView(step=400)) == {"ftar_checkpoint_step": 400, "ftar_checkpoint_failures_total": 0}
    whole = CheckpointView(step=400, time=940.0, bytes=5_000_000, seconds=1.5)
    assert checkpoints(whole) == {
        "ftar_checkpoint_step": 400,
        "ftar_checkpoint_age_seconds": 60.0,
        "ftar_checkpoint_bytes": 5_000_000,
        "ftar_checkpoint_write_seconds": 1.5,
        "ftar_checkpoint_failures_total": 0,
    }
    failed = checkpoints(CheckpointView(failed_step=500, failed_time=990.0, failed="r1: disk full", failures=2))
    assert failed == {
        "ftar_checkpoint_failed_step": 500,
        "ftar_checkpoint_failure_age_seconds": 10.0,
        "ftar_checkpoint_failures_total": 2,
    }


def test_the_agent_hands_on_what_a_coordinator_says() -> None:
    machine = Coordinator(
        JobConfig(job="demo", replicas=2), Claim(term=Term(1, "x"), record=None, fresh=True), now=10.0
    )
    state = job_state(machine.view(13.5, 1000.0)).accounting
    assert state is not None
    assert [(s.category, s.cause, s.us) for s in state.spent] == [("starting", None, 3_500_000)]
    assert (state.total_us, state.effective, state.since) == (3_500_000, 0.0, 996.5)


def an_agent(call: Any, coordinator: object = object()) -> Any:
    return SimpleNamespace(
        settings=SimpleNamespace(node="node0", coordinator=coordinator),
        account_reads=SharedRead(),
        job_pool=SimpleNamespace(call=call),
        relay=SimpleNamespace(saved=None),
    )


def test_a_coordinator_that_hangs_refuses_or_is_none_costs_only_what_it_would_have_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_routes, "ACCOUNT_S", 0.02)

    async def hangs(*_args: object) -> OpReply:
        await asyncio.sleep(3600)
        return REPLY

    async def refuses(*_args: object) -> OpReply:
        raise ApiProblem("coordinator", "coordinator", "no such request: accounting")

    async def answers(*_args: object) -> OpReply:
        return REPLY

    async def ask() -> list[OpReply | None]:
        return [
            await node_routes._saved(an_agent(hangs)),
            await node_routes._saved(an_agent(refuses)),
            await node_routes._saved(an_agent(answers, coordinator=None)),
            await node_routes._saved(an_agent(answers)),
        ]

    assert asyncio.run(ask()) == [None, None, None, REPLY]
