"""The coordinator's state as operators see it. Pure: the caller says what time it is, on both clocks."""

from __future__ import annotations

from ftar_core.protocol.divergence import alarm_of
from ftar_core.protocol.job import Job, Mode
from ftar_core.protocol.membership import ACTIVE, Replica
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.messages import JobView, ReplicaView, StallView


def view(job: Job, now: float, wall: float) -> JobView:
    """`now`: the machine's clock; `wall`: the same moment in Unix seconds. `pid` is the shell's to add."""
    offset = wall - now
    median_s = job.stalls.median_step_s()
    return JobView(
        name=job.config.job,
        state=_state(job),
        reason=_reason(job),
        step=job.step,
        term=job.term.number,
        epoch=job.epoch.id.number,
        contributors=tuple(job.contributors()),
        replicas_wanted=job.config.replicas,
        spares_wanted=job.config.spares,
        min_replicas=job.config.min_replicas,
        replicas=tuple(_replica(job, r, now, offset) for _, r in sorted(job.table.replicas.items())),
        stalls=tuple(
            StallView(
                time=i.at + offset,
                kind=i.kind,
                replica=i.replica,
                step=i.step,
                detect_ms=i.detect_ms,
                stall_ms=i.stall_ms,
                reason=i.reason,
            )
            for i in job.stalls.incidents
        ),
        settings=job.config.shown(),
        checkpoint=job.kept.view(offset),
        step_ms_median=None if median_s is None else median_s * 1000,
        started=job.started + offset,
        accounting=job.accounting.view(now, wall),
    )


def _state(job: Job) -> str:
    return "holding" if job.mode is Mode.RUNNING and job.hold_reason else job.mode.value


def _reason(job: Job) -> str:
    """What an operator should know, the worst first."""
    said: list[str] = []
    for trouble in (job.hold_reason, job.network_trouble, job.record_problem, job.reason):
        if trouble and not any(trouble in earlier for earlier in said):
            said.append(trouble)
    return "; ".join(said)


def _replica(job: Job, replica: Replica, now: float, offset: float) -> ReplicaView:
    connected = replica.conn is not None
    pace = job.paces.by_name.get(replica.name)
    medians = pace.medians() if pace is not None else None
    return ReplicaView(
        name=replica.name,
        state=replica.state.value,
        reason=replica.reason,
        since=replica.since + offset,
        incarnation=replica.incarnation,
        slot=replica.slot,
        step=job.step if replica.state in ACTIVE else replica.step,
        nodes=tuple(dict.fromkeys(rank.node for rank in replica.ranks)),
        heartbeat_age_ms=(now - replica.last_life) * 1000 if connected and replica.beats else None,
        phase=Phase(replica.phase).name.lower() if connected and replica.beats else "",
        loss=replica.loss,
        step_ms=replica.step_ms,
        compute_ms=medians[0] if medians else None,
        wait_ms=medians[1] if medians else None,
        pace=job.paces.ratio(replica.name),
        straggler=pace is not None and pace.straggler,
        diverged=alarm_of(job, replica) if connected else "",
    )
