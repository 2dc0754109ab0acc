"""What the job does, as its book has to know it (accounting.py): the few places at which one is told of the other."""

from __future__ import annotations

from collections.abc import Mapping

from ftar_core.protocol.accounting import BEGINNING, DOWN, Key
from ftar_core.protocol.job import Job, Mode
from ftar_core.protocol.membership import Replica, State
from ftar_core.wire.accounting import Category, Loss
from ftar_core.wire.heartbeat import Phase

# What a replica may take its time for, while the others wait.
PHASES: Mapping[int, Loss] = {
    Phase.CHECKPOINT: Loss.CHECKPOINT,
    Phase.EVALUATION: Loss.EVALUATION,
    Phase.COMPILE: Loss.COMPILE,
}


def stand(job: Job, now: float) -> None:
    """After every event: does time pass in a step, or in something else?"""
    if job.mode in (Mode.FINISHED, Mode.STOPPED):
        job.accounting.end(now)
    else:
        job.accounting.stand(_stands(job), now)


def _stands(job: Job) -> Key | None:
    if job.mode is Mode.STARTING:
        return BEGINNING
    if job.mode is Mode.RECOVERING:
        return (Category.STALLED, Loss.VANISHED) if job.accounting.ran else DOWN
    return (Category.STALLED, job.hold_cause) if job.hold_reason else None


def heard(job: Job, replica: Replica) -> None:
    """A heartbeat. Nearly all of them are of phases that belong to a step."""
    cause = PHASES.get(replica.phase)
    if cause is not None and replica.name in job.members:
        job.accounting.see(cause)


def rail(job: Job, state: str) -> None:
    if state == "DOWN":
        job.accounting.see(Loss.LINK)


def committed(job: Job, step: int, now: float, *, skipped: bool) -> None:
    """The running step commits. Only of a late one it is worth to ask what else was going on."""
    book = job.accounting
    if book.late(now):
        if job.drains:
            book.see(Loss.DRAINED)
        catching_up = (State.FETCHING, State.REPLAYING)
        if job.preparation is not None or any(r.conn is not None and r.state in catching_up for r in job.table):
            book.see(Loss.REJOIN)
    book.committed(step, len(job.members), now, skipped=skipped, lead_ms=job.paces.lead_ms)
