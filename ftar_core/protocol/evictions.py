"""Evictions that nobody asked for, and the guards that keep a detector from ending the job it watches."""

from __future__ import annotations

from ftar_core.protocol.job import Job
from ftar_core.protocol.membership import Cause, Replica
from ftar_core.wire.accounting import Loss


def auto_evict(
    job: Job,
    replica: Replica,
    why: str,
    now: float,
    loss: Loss,
    *,
    cause: Cause = Cause.EVICT,
    evidence: str = "",
    in_place: bool = True,
) -> bool:
    """Evict without being asked, if the guards allow; otherwise say why not (once). `in_place` as for Job.evict."""
    detection = job.config.detection
    refusal = ""
    if len(job.members) - len(job.gone) <= 1:
        refusal = "it is the last contributor"
    elif not job.may_auto_evict(now):
        minutes = detection.eviction_window_s / 60
        refusal = f"automatic evictions are limited to {detection.max_evictions} in {minutes:g} min"
    if refusal:
        reason = f"{why}; not evicted: {refusal} (`ftctl evict replica {replica.name}` does it)"
        if replica.name not in job.withheld:
            job.withheld.add(replica.name)
            job.emit("replica.eviction-withheld", replica.name, reason)
        replica.reason = reason
        return False
    job.auto_evictions.append(now)
    job.evict(replica, why, now, rejoin=True, cause=cause, in_place=in_place, evidence=evidence, loss=loss)
    return True
