"""A job for tests of ftctl, as the coordinator behind the agents shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from agents.api import models as m
from agents.api.job import CheckpointState


def replica(name: str, node: str, state: str = "contributing", **change: Any) -> m.ReplicaState:
    base: dict[str, Any] = {
        "name": name,
        "state": state,
        "reason": "",
        "since": time.time() - 5,
        "incarnation": 1,
        "slot": int(name[1:]),
        "step": 100,
        "nodes": [node],
        "heartbeat_age_ms": 40.0,
        "phase": "FORWARD",
        "loss": 2.5,
        "step_ms": 200.0,
    }
    return m.ReplicaState(**{**base, **change})


@dataclass
class FakeJob:
    """The coordinator behind the agents; None in FakeCluster.job means that it is dead."""

    replicas: dict[str, m.ReplicaState]
    state: str = "running"
    reason: str = ""
    min_replicas: int = 2
    replicas_wanted: int = 0  # all, if not said
    spares_wanted: int = 0
    after_rejoin: str = "starting"
    supervised: list[tuple[str, str, str]] = field(default_factory=list)  # (agent, verb, replica)
    stalls: list[m.StallState] = field(default_factory=list)
    events: list[m.EventRecord] = field(default_factory=list)
    actions: list[tuple[str, str, m.ReplicaAction]] = field(default_factory=list)
    accounting: m.JobAccount | None = None
    checkpoint: CheckpointState = field(default_factory=CheckpointState)

    def view(self) -> m.JobState:
        contributors = [name for name, r in self.replicas.items() if r.state == "contributing"]
        return m.JobState(
            name="main",
            state=self.state,
            reason=self.reason,
            step=100,
            term=1,
            epoch=7,
            contributors=contributors,
            replicas_wanted=self.replicas_wanted or len(self.replicas),
            spares_wanted=self.spares_wanted,
            min_replicas=self.min_replicas,
            replicas=list(self.replicas.values()),
            stalls=self.stalls,
            settings={"evict_after_s": 2.0},
            step_ms_median=201.0,
            pid=4242,
            started=time.time() - 60,
            accounting=self.accounting,
            checkpoint=self.checkpoint,
        )

    def set(self, name: str, state: str, **change: Any) -> None:
        self.replicas[name] = self.replicas[name].model_copy(update={"state": state, "since": time.time(), **change})


def event(seq: int, source: str, kind: str, thing: str, reason: str = "", **change: Any) -> m.EventRecord:
    return m.EventRecord(
        **{
            "seq": seq,
            "time": time.time() - 1000 + seq,
            "source": source,
            "kind": kind,
            "object": thing,
            "reason": reason,
            **change,
        }
    )
