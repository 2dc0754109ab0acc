"""Hot spares: shadows that have caught up while the job has all replicas it wants.

A spare follows the commits, so its state is that of the last one; it contributes nothing and slows nobody. When a
contributor leaves, it takes that slot at the next boundary, through the same preparation as any join:

* a member drains: the membership without it and with the spare is prepared, and comes into force with the commit with
  which the member leaves. As many contribute as before, in the same slots, so the bits are those of a run without it.
* a member is lost in step n: the survivors reduce n again, as they were dealt, while the spare's links are connected;
  it contributes from n+1. Connecting takes milliseconds and so does the second reduction: the commit of n waits for
  the spare, but no longer than `promote_wait_s`, and then goes on without it. (The member it followed may be the one
  that is lost: then it has to find another source first, within the same time.)

Rejected: links of every spare to every slot's neighbours, kept up for the day they are needed. It would save those
milliseconds, and cost S x R connections with their heartbeats; and it would prove nothing about the moment of the loss,
at which all must answer `Prepared` anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftar_core.protocol.chains import Chain
from ftar_core.protocol.job import NEVER, Job
from ftar_core.protocol.joins import FOLLOW_LAG, cancel_preparation, consider_joins, follows, room
from ftar_core.protocol.membership import Replica, State, natural
from ftar_core.wire.messages import MemberInfo


def vacate(job: Job, names: Mapping[str, str]) -> None:
    """These members have left; why, for whoever takes their slots."""
    slots = {m.slot: (m.replica, names[m.replica]) for m in job.epoch.members if m.replica in names}
    if slots:
        job.vacated = {**job.vacated, **slots}


def promoted(job: Job, newcomer: Replica) -> str:
    """Why this replica, which joins now, has another's slot; empty if it has not. The slot is its own from here on."""
    entry = job.vacated.get(newcomer.slot)
    if entry is None:
        return ""
    job.vacated = {slot: left for slot, left in job.vacated.items() if slot != newcomer.slot}
    former, why = entry
    if former == newcomer.name:
        return ""
    job.table.forget_slot(former, newcomer.slot)
    job.chains = job.chains.stands_in(former, newcomer.name)
    return f"promoted into slot {newcomer.slot} because {former} {why}"


def chain_of(job: Job, gone: Iterable[str], joining: Iterable[MemberInfo]) -> Chain | None:
    """What a change of the membership belongs to: who goes, who comes, and in whose place."""
    coming = list(joining)
    places = [job.vacated[member.slot][0] for member in coming if member.slot in job.vacated]
    return job.chains.of([*gone, *(member.replica for member in coming), *places])


def watch_out(job: Job, members: int, now: float) -> None:
    """Members were lost and so many are left: the commit of this step waits a moment for a spare, if there is one."""
    job.promotable, job.promote_by = _near(job), NEVER
    if job.promotable and members < job.config.replicas:
        job.promote_by = job.timers["promote"] = now + job.config.promote_wait_s


def watch_drain(job: Job, now: float) -> None:
    """A member wants to leave. A spare that follows it is told to follow another, and may need a moment for that."""
    job.promotable = _near(job)
    job.drain_by = now + job.config.prepare_s


def _near(job: Job) -> frozenset[str]:
    """Shadows that are ready, or were so close behind that they soon will be: one that followed the lost member may
    have noticed the loss, and said that it is ready no more, before anybody told the coordinator of it."""
    close = (r.name for r in job.table if r.shadow and r.state is State.REPLAYING and _keeps_up(job, r))
    return frozenset((*job.ready, *close))


def _keeps_up(job: Job, replica: Replica) -> bool:
    return replica.step >= job.step - 1 - FOLLOW_LAG


def waits_for_spare(job: Job, now: float) -> bool:
    """The step could commit, but a hot spare is about to be able to take the place of a lost member."""
    if now >= job.promote_by or room(job) <= 0 or job.gone:
        return False  # (with another one gone, all results are here now and may not be soon)
    preparation = job.preparation
    if preparation is not None:
        return bool(preparation.waiting) or not follows(job)
    return any(_hopeful(job, name, now) for name in job.promotable)


def _hopeful(job: Job, name: str, now: float) -> bool:
    """Ready, or it was and has to find another source."""
    replica = job.table.get(name)
    if replica is None or replica.conn is None or replica.not_before > now:
        return False
    return replica.state in (State.SPARE, State.REPLAYING) and _keeps_up(job, replica)


def drain_waits(job: Job, now: float) -> bool:
    """Members want to leave with this commit, but a spare that takes their place is not connected yet."""
    if not job.drains:
        return False
    if job.preparation is None:
        consider_joins(job, now)  # both may have come in the middle of a change
    preparation = job.preparation
    if preparation is None or not preparation.leaving:
        return now < job.drain_by and any(_hopeful(job, name, now) for name in job.promotable)
    if now < preparation.began + job.config.prepare_s:
        return True
    cancel_preparation(job, "the spare does not keep up: the drain goes without it")
    return False


def stand_in(job: Job) -> str:
    """Who would take the place of a contributor that leaves now; empty: nobody."""
    return min(job.ready, key=natural, default="") if room(job) <= 0 else ""
