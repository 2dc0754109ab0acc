"""All contributors are gone in front of our eyes: shadows that followed them go on.

The running step is committed nowhere then. Who has caught up to the step before it holds the truth, and repeats it
(`promote`). Who followed and is a few steps behind, because its source died before the last ones were passed on, holds
more than any checkpoint: if nobody can come back with the truth any more, the job begins again behind the newest step
that a shadow holds, as it would behind a checkpoint, and with as little lost as possible (`begin_again`). What was
dealt at that step is remembered for the last few.
"""

from __future__ import annotations

from ftar_core.protocol import sampler
from ftar_core.protocol.commit import announce, enter_epoch, snapshot
from ftar_core.protocol.job import Job, Mode, Undo
from ftar_core.protocol.membership import Replica
from ftar_core.protocol.outliers import Outliers
from ftar_core.protocol.recovery import Basis


def promote(job: Job, now: float) -> bool:
    """Shadows that hold all that was committed go on with the running step."""
    able = _at(job, job.step - 1)
    if not able:
        return False
    why = f"all contributors are gone; {_names(able)} had caught up to step {job.step - 1} and goes on"
    _enter(job, able, why, snapshot(job, [r.name for r in able]), now)
    return True


def begin_again(job: Job, basis: Basis, kept: int, now: float) -> bool:
    """Nobody is left who was in the job, and nobody with more than its shadows is expected. `kept`: the step of the
    newest checkpoint, 0 if there is none."""
    if not job.epoch.members:
        return False  # another life of the coordinator: what was dealt then is not known
    steps = {r.step for name in job.ready if (r := job.table.get(name)) is not None and r.conn is not None}
    step = max((s for s in steps if kept < s < job.step - 1 and s in job.deals and s in job.commits), default=0)
    able = _at(job, step) if step else []
    if not able:
        return False
    undo = snapshot(job, [r.name for r in able])
    for replica in list(job.table):  # who replays, or fetches from a source that is gone, has steps that come again
        if replica.shadow and replica.conn is not None and not (replica.name in job.ready and replica.step == step):
            why = f"the job begins again behind step {step}"
            job.evict(replica, why, now, rejoin=True, in_place=True)
    lost = job.step - 1 - step
    job.step, job.deal, job.last_commit_epoch = step + 1, job.deals[step], job.commits[step]
    job.committed(step, job.last_commit_epoch)
    forget_what_was_said(job)
    again = f"{lost} step{'s' if lost != 1 else ''} of those who are gone {'are' if lost != 1 else 'is'} trained again"
    than = f", newer than the checkpoint of step {kept}" if kept else ""
    why = f"nobody of epoch {basis.epoch.id} is left: {_names(able)} goes on behind step {step}{than}; {again}"
    _enter(job, able, why, undo, now)
    return True


def forget_what_was_said(job: Job) -> None:
    """It names steps that come again, and what goes wrong with them then must be told anew."""
    job.alarms.clear()
    job.outliers = Outliers()


def running(job: Job) -> None:
    """Nothing is waited for any more."""
    job.mode, job.reason, job.standings, job.basis = Mode.RUNNING, "", {}, None
    job.waited = job.waited_long = job.waited_for_all = job.forced = False
    for timer in ("recovery", "gather", "start-over", "hold-exit"):
        job.timers.pop(timer, None)


def _at(job: Job, step: int) -> list[Replica]:
    """Shadows that hold the state after `step`, as many as the job wants."""
    able = [r for n in sorted(job.ready) if (r := job.table.get(n)) is not None and r.step == step]
    return able[: job.config.replicas]


def _names(replicas: list[Replica]) -> str:
    return ", ".join(replica.name for replica in replicas)


def _enter(job: Job, able: list[Replica], why: str, undo: Undo, now: float) -> None:
    job.table.give_slots(able, set())
    epoch = job.mint_epoch(r.member() for r in able)
    if not any(name in job.deal.batches for name in epoch.names()):
        job.deal = sampler.again(job.deal, epoch.names())
    job.dealt_to = epoch.members
    running(job)
    job.accounting.begins(job.step, now)
    enter_epoch(job, epoch, able, now, lost={}, undo=undo)
    announce(job, why)
    job.emit("job.running", job.config.job, why)
    job.timers["sort"] = now
