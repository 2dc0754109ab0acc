"""The stall of an incident: beyond what a calm step costs, whatever the members' clocks say."""

from __future__ import annotations

import pytest

from ftar_core.protocol.stalls import Incident, Stalls
from ftar_core.wire.ids import NO_EPOCH
from ftar_core.wire.messages import Done


def done(produced_at: float) -> Done:
    return Done(step=1, epoch=NO_EPOCH, digest=0, finite=True, produced_at=produced_at)


def calm(stalls: Stalls, steps: int = 20, start: float = 100.0) -> float:
    now = start
    for _ in range(steps):
        now += 0.2
        stalls.committed({"r0": done(now - 0.02), "r1": done(now - 0.03 + 5000)}, now)  # r1's clock began elsewhere
    return now


def test_a_killed_replica_stalls_the_survivors_by_what_the_commit_was_late() -> None:
    stalls = Stalls()
    now = calm(stalls)
    stalls.begin(Incident(now, "replica-lost", "r2", 21, "killed", 16.0))
    now += 0.6
    stalls.committed({"r0": done(now - 0.42), "r1": done(now - 0.43 + 5000)}, now)
    incident = stalls.incidents[-1]
    assert incident.stall_ms == pytest.approx(400, abs=1)
    assert incident.detect_ms == 16.0
    assert stalls.median_step_s() == pytest.approx(0.2)


def test_an_incident_that_cost_nothing_has_a_stall_of_nothing() -> None:
    stalls = Stalls()
    now = calm(stalls)
    stalls.begin(Incident(now, "replica-joined", "r2", 21, "caught up"))
    stalls.committed({"r0": done(now + 0.2 - 0.01), "r1": done(now + 0.2 - 0.02 + 5000)}, now + 0.2)
    assert stalls.incidents[-1].stall_ms == 0.0


def test_without_a_calm_step_nothing_is_claimed() -> None:
    stalls = Stalls()
    stalls.begin(Incident(1.0, "replica-lost", "r2", 1, "killed"))
    stalls.committed({"r0": done(0.5)}, 1.0)
    assert stalls.incidents[-1].stall_ms is None
