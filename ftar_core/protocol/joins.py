"""Shadows on their way in: whom they fetch from, and the preparation that makes a join cost nobody anything.

Where the job has all replicas it wants, a shadow that has caught up stays one: a hot spare. Whom it replaces, and when
a commit waits for it, is in spares.py; its way in is the same.

A join is prepared in the background: everybody of the next membership connects its new links while the present epoch
runs on, and only when all have said `Prepared` does the next commit carry the new epoch. Any epoch change in between
cancels the preparation; its number is never used again. One that takes too long is cancelled too: the replicas that
did not answer are named, and a newcomer among them waits, twice as long each time, before it is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftar_core.protocol.job import Job, Mode
from ftar_core.protocol.membership import Cause, Replica, State, natural
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Catchup, CaughtUp, EpochInfo, MemberInfo, Prepare, PrepareCancel, Progress

SOURCES = 16  # a shadow needs a few to stripe its fetch over; the whole membership of a large job would be megabytes
FOLLOW_LAG = 4  # steps; short ones are over before the replay of the last is told
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0


@dataclass
class Preparation:
    """A membership whose links are being connected. `waiting`: who has not said `Prepared`. `leaving`: draining members
    whose places the newcomers take, and who leave when it comes into force."""

    epoch: EpochInfo
    newcomers: tuple[str, ...]
    waiting: set[str]
    leaving: tuple[str, ...]
    began: float


def refresh_sources(job: Job, now: float) -> None:
    """Tell all shadows whom to follow; called when the contributors have changed."""
    members = [m for m in job.epoch.members if m.replica not in job.gone]
    for replica in job.table:
        if replica.shadow:
            send_catchup(job, replica, members)


def send_catchup(job: Job, replica: Replica, members: Sequence[MemberInfo] | None = None) -> None:
    """Name a few contributors as sources; different shadows begin at different ones."""
    if members is None:
        members = [m for m in job.epoch.members if m.replica not in job.gone]
    # One that is about to leave would take the stream with it, in the middle of the step that it leaves behind.
    members = [m for m in members if m.replica not in job.drains] or members
    if not members:
        return
    start, count = sum(replica.name.encode()), len(members)
    sources = tuple(members[(start + i) % count] for i in range(min(SOURCES, count)))
    fresh = _must_forget(job, replica)
    job.send(replica, Catchup(term=job.term, sources=sources, fresh=fresh, mbit=_share(job)))


def _share(job: Job) -> float:
    """Of the job's limit, for each shadow that still catches up."""
    busy = sum(r.shadow and r.state in (State.FETCHING, State.REPLAYING) for r in job.table)
    return job.config.catchup_mbit / max(1, busy)


def _must_forget(job: Job, replica: Replica) -> bool:
    """The state it came with cannot be built on. Judged once a Hello: what it holds later it has from our members.

    A new incarnation that brings state was in the job and was put out; what it missed may include a recovery that went
    on without what it knew, so its state must be known to fit. A shadow that connects again keeps what it has unless
    that is known to be wrong: it did not contribute, and after a restart of the coordinator nothing older is known."""
    if not replica.unproven or replica.hello is None:
        return False
    replica.unproven = False
    fits = job.of_history(replica.hello.report)
    returned = replica.hello.incarnation == 0
    return fits is False or (returned and fits is None)


def admit_shadow(job: Job, replica: Replica, why: str, now: float) -> None:
    """Begin (or begin again) to catch up."""
    job.ready.discard(replica.name)
    if replica.move(Cause.FETCH, now, why):
        job.emit("replica.fetching", replica.name, why)
    send_catchup(job, replica)
    _share_anew(job, replica)


def _share_anew(job: Job, but: Replica) -> None:
    """How many share the job's limit has changed; `but` has been told already, or need not be."""
    if job.config.catchup_mbit:
        for replica in job.table:
            if replica is not but and replica.shadow and replica.state in (State.FETCHING, State.REPLAYING):
                send_catchup(job, replica)


def on_progress(job: Job, replica: Replica, message: Progress, now: float) -> None:
    """What a shadow says about itself, for status. A contributor's word changes nothing."""
    if not replica.shadow or job.mode is not Mode.RUNNING:
        return
    causes = {State.FETCHING.value: Cause.FETCH, State.REPLAYING.value: Cause.REPLAY}
    cause = causes.get(message.state)
    if cause is None or replica.state is State.STARTING:
        return
    replica.step = message.step
    if message.notice:
        job.emit("replica.catchup-restarted", replica.name, message.notice)
    if replica.name in job.ready:
        job.ready.discard(replica.name)
        cancel_if_involved(job, replica.name, f"{replica.name} has to catch up again")
    if replica.move(cause, now, message.text or message.state):
        job.emit(f"replica.{message.state}", replica.name, replica.reason)


def on_caught_up(job: Job, replica: Replica, message: CaughtUp, now: float) -> None:
    """It holds the state after `message.step` and follows; or, already a member, the state has reached it."""
    if job.is_member(replica) and message.step >= job.step - 1:
        replica.holds_state = True
    if not replica.shadow:
        return
    replica.step = message.step
    if job.mode not in (Mode.RUNNING, Mode.RECOVERING):
        return
    first = replica.name not in job.ready
    job.ready.add(replica.name)
    why = f"caught up to step {message.step}"
    if room(job) <= 0:
        why += f"; a hot spare: the job has all {job.config.replicas} replicas it wants"
    if replica.move(Cause.READY, now, why) and first:
        job.emit("replica.caught-up", replica.name, replica.reason)
        if room(job) <= 0:
            job.chains = job.chains.over(replica.name)  # it stays a spare: it is as well as it can be
        _share_anew(job, replica)


def room(job: Job) -> int:
    """How many more replicas the job wants to contribute."""
    return job.config.replicas - len(job.members)


def drains_due(job: Job, newcomers: int = 0) -> tuple[str, ...]:
    """Draining members that may leave with the next commit: never the last, nor below min-replicas unless forced.
    `newcomers`: how many join with that commit."""
    due: list[str] = []
    left = len(job.members) - len(job.gone)
    for name in job.draining():
        floor = 1 if name in job.forced_drains else job.config.min_replicas
        if left - 1 >= 1 and left - 1 + newcomers >= floor:
            due.append(name)
            left -= 1
    return tuple(due)


def follows(job: Job) -> bool:
    """All newcomers of the preparation are close behind: none would make the others wait for its replay."""
    preparation = job.preparation
    names = preparation.newcomers if preparation is not None else ()
    return all(n in job.ready and job.table.replicas[n].step >= job.step - 1 - FOLLOW_LAG for n in names)


def consider_joins(job: Job, now: float) -> None:
    """Begin to prepare a join if somebody is ready, there is a place, and nothing stands in its way. A member that
    drains makes a place: a hot spare then comes in with the commit with which it leaves."""
    if not job.ready or job.gone or job.finishing or job.hold_reason or job.timers.get("record", 0.0) > now:
        return
    preparation = job.preparation
    if preparation is not None:
        if preparation.leaving == drains_due(job, len(preparation.newcomers)):
            return
        cancel_preparation(job, "other members leave now")
    able = able_shadows(job, now)
    places = room(job) + len(drains_due(job, len(able)))
    able = able[: max(0, places)]
    if able:
        _prepare(job, able, drains_due(job, len(able)), now)


def able_shadows(job: Job, now: float) -> list[Replica]:
    """Those that could join, the lowest name first; a timer looks again when another may be tried."""
    candidates = [r for name in job.ready if (r := job.table.get(name)) is not None]
    later = [r.not_before for r in candidates if r.not_before > now]
    if later:
        job.timers["join"] = min(later)
    return sorted((r for r in candidates if r.not_before <= now), key=lambda r: natural(r.name))


def _prepare(job: Job, newcomers: list[Replica], leaving: tuple[str, ...], now: float) -> None:
    stay = [m for m in job.epoch.members if m.replica not in leaving]
    job.table.give_slots(newcomers, {m.slot for m in stay}, job.config.replicas)
    epoch = job.mint_epoch([*stay, *(r.member() for r in newcomers)])
    names = tuple(r.name for r in newcomers)
    job.preparation = Preparation(epoch, names, set(epoch.names()), leaving, now)
    job.timers["preparation"] = now + job.config.prepare_s
    message = Prepare(term=job.term, epoch=epoch)
    for name in epoch.names():
        job.send_to(name, message)


def on_prepared(job: Job, replica: Replica, epoch: EpochId) -> None:
    """Its links of the prepared epoch are up."""
    preparation = job.preparation
    if preparation is None or preparation.epoch.id != epoch:
        return
    preparation.waiting.discard(replica.name)
    if not preparation.waiting:
        job.timers.pop("preparation", None)


def preparation_late(job: Job, now: float) -> None:
    """Links did not come up in time: name who did not answer, and try again later."""
    preparation = job.preparation
    if preparation is None or not preparation.waiting:
        return
    late = sorted(preparation.waiting, key=natural)
    newcomers = [n for n in preparation.newcomers if n in preparation.waiting]
    names = ", ".join(late[:8]) + ("" if len(late) <= 8 else f" and {len(late) - 8} more")
    why = f"links not up within {job.config.prepare_s:g} s: no answer from {names}"
    cancel_preparation(job, why)
    # Where only old members were late, any newcomer may be the cause; they all wait a little.
    for name in newcomers or preparation.newcomers:
        replica = job.table.get(name)
        if replica is not None:
            back_off(replica, now)
            job.emit("replica.join-delayed", name, f"{why}; tried again in {replica.backoff_s:g} s")


def back_off(replica: Replica, now: float) -> None:
    """Twice as long as the last time before its next join is prepared."""
    replica.backoff_s = min(BACKOFF_MAX_S, replica.backoff_s * 2 or BACKOFF_FIRST_S)
    replica.not_before = now + replica.backoff_s


def cancel_if_involved(job: Job, name: str, why: str) -> None:
    """A newcomer that is gone or not ready any more takes its preparation with it."""
    if job.preparation is not None and name in job.preparation.newcomers:
        cancel_preparation(job, why)


def cancel_preparation(job: Job, why: str) -> None:
    """Everybody drops the links of the prepared epoch."""
    preparation = job.preparation
    if preparation is None:
        return
    job.preparation = None
    job.timers.pop("preparation", None)
    message = PrepareCancel(term=job.term, epoch=preparation.epoch.id)
    for name in preparation.epoch.names():
        job.send_to(name, message)
