"""Commits and epoch changes: the two ways in which what is true moves on.

`advance` looks at the facts after every event and does the next thing; it is not driven by who sent what last. So a
lost member, a failed record or a late timer cannot leave it between two states.

* All members reported `Done` of the running step: it commits, for everybody, even if one of them is gone by now. A
  commit within the epoch needs no record (all hold the result, so whoever recovers cannot choose otherwise); one that
  carries the next epoch is sent behind its record.
* A member is gone and not all had reported: a new epoch, at once, that reduces the same step again, as it was dealt.
* Their results differ: divergence.py says whether it is committed all the same.
* Fewer than min-replicas: the epoch goes on to exist, its step is reduced, and the commit is withheld until shadows
  that have caught up make it enough. So nothing special happens to survivors, and whoever is back starts at this step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ftar_core.protocol import sampler, timesheet
from ftar_core.protocol.chains import Chain
from ftar_core.protocol.divergence import agreed, trusted
from ftar_core.protocol.job import NEVER, Job, Mode, Undo
from ftar_core.protocol.joins import cancel_preparation, consider_joins, drains_due, follows, refresh_sources
from ftar_core.protocol.membership import Cause, Replica, State, natural
from ftar_core.protocol.recovery import Basis
from ftar_core.protocol.spares import chain_of, drain_waits, promoted, vacate, waits_for_spare, watch_out
from ftar_core.protocol.stalls import Incident
from ftar_core.wire.accounting import Loss
from ftar_core.wire.ids import NO_EPOCH
from ftar_core.wire.messages import Commit, Done, EpochInfo, Hold, Join, MemberInfo, NewEpoch, Verdict


def advance(job: Job, now: float) -> None:
    """Do what the facts ask for, until nothing more is to be done."""
    while job.mode is Mode.RUNNING and not job.persisted:
        if not (_commit_step(job, now) or _change_epoch(job, now)):
            _watch_hold(job, now)
            consider_joins(job, now)
            return
    if job.mode is Mode.RUNNING:
        job.timers["again"] = now  # the rest when the record is known to be written


# --- commit --------------------------------------------------------------------------------------------------------


def _commit_step(job: Job, now: float) -> bool:
    """Commit the running step if everybody has it. True if something was done."""
    if len(job.done) < len(job.members) or job.diverged or len(job.gone) == len(job.members):
        return False  # (where nobody is left to hear it, nothing is gained by committing)
    if len(job.members) < job.config.min_replicas:
        return False
    if not agreed(job, now):
        return not job.done  # somebody was put out for it
    last = last_reason(job) or failure(job, trusted(job))
    if not last and waits_for_spare(job, now):
        return False
    following, drained = _next_membership(job, now) if not last else (None, ())
    _send_commit(job, now, following, drained, last)
    return True


def last_reason(job: Job, committed: Sequence[str] | None = None) -> str:
    """Why the commit of the running step is the last one; empty if it is not. `committed`: its contributors, where
    these are not the members of the running epoch."""
    if job.finishing:
        return job.finishing
    if job.config.steps and job.step >= job.config.steps:
        return f"step {job.step} is the last of {job.config.steps}"
    if job.last_wish and job.step >= job.last_wish:
        return f"all training scripts end with step {job.last_wish}"
    if sampler.exhausted(job.deal, job.epoch.names() if committed is None else committed):
        return f"all {job.deal.limit} batches of the data are trained"
    return ""


def _next_membership(job: Job, now: float) -> tuple[EpochInfo | None, tuple[str, ...]]:
    """The epoch that comes into force with this commit, if any, and who leaves with it."""
    if job.gone:
        return None, ()  # the epoch change behind this commit cares for everybody
    preparation = job.preparation
    if preparation is not None and not preparation.waiting and follows(job):
        return (preparation.epoch, preparation.leaving) if job.can_persist(now) else (None, ())
    if drain_waits(job, now):
        return None, ()
    drained = drains_due(job)
    if not drained or not job.can_persist(now):
        return None, ()
    cancel_preparation(job, "a drain goes first")
    return job.mint_epoch(m for m in job.epoch.members if m.replica not in drained), drained


def _send_commit(job: Job, now: float, following: EpochInfo | None, drained: tuple[str, ...], last: str) -> None:
    before, members, done, step = job.epoch, job.members, job.done, job.step
    verdict = verdict_of(trusted(job).values(), fail=job.config.fail_on_nonfinite)
    stay = [m for m in (following or before).members if m.replica not in job.gone]
    deal = sampler.following(job.deal, before.names(), [m.replica for m in stay])
    commit = Commit(
        term=job.term,
        step=step,
        epoch=before.id,
        contributors=before.names(),
        verdict=verdict,
        deal=deal,
        next=following,
        drained=drained,
        last=bool(last),
        checkpoint=_checkpoint_due(job, now),
    )
    joined = [m for m in following.members if m.replica not in members] if following is not None else []
    job.stalls.committed(job.done, now)
    _say_pace(job)
    timesheet.committed(job, step, now, skipped=verdict is not Verdict.APPLY)
    for name, hint in job.outliers.committed(step, done):
        job.emit("replica.gradient_outlier", name, hint)
    if following is not None:
        undo = snapshot(job, [*drained, *(m.replica for m in joined)])
        job.preparation = None
        job.table.cordoned |= frozenset(drained)
        vacate(job, {n: f"was drained ({job.table.replicas[n].reason})" for n in drained})
        job.persist(job.record_of(following, step + 1, deal, before.id), undo)
    for member in before.members:
        job.send_to(member.replica, commit)
    job.last_commit = msgspec.structs.replace(commit, next=None, drained=())
    job.step, job.deal, job.last_commit_epoch, job.done = step + 1, deal, before.id, {}
    job.committed(step, before.id)
    job.dealt_to = tuple(stay)
    if verdict is Verdict.SKIP:
        job.emit("step.skipped", f"step {step}", f"{_not_finite(done)}: nobody updates")
    if last:
        finish(job, now, last, failed=verdict is Verdict.FAIL)
    elif following is not None:
        chain = chain_of(job, drained, joined)
        _enter(job, following, joined, now)
        for name in drained:
            replica = job.table.replicas[name]
            why = f"left behind step {step}, on request: {replica.reason}"
            replica.move(Cause.LEFT, now, why)
            job.drains = job.drains - {name}
            job.emit("replica.drained", name, why)
            job.stalls.begin(Incident(now, "replica-drained", name, step + 1, replica.reason))
            job.accounting.lost(name, Loss.DRAINED, now)
        announce(job, f"with the commit of step {step}", chain)


def _checkpoint_due(job: Job, now: float) -> bool:
    """By time: one clock decides, so that all replicas keep the state of the same step."""
    if not job.checkpoint_s:
        return False
    if job.checkpoint_at == NEVER:
        job.checkpoint_at = now
    due = now - job.checkpoint_at >= job.checkpoint_s
    if due:
        job.checkpoint_at = now
    return due


def _say_pace(job: Job) -> None:
    """Hints about stragglers, from the reports of the step that is committed."""
    detection = job.config.detection
    for hint in job.paces.committed(job.done, detection.straggler_factor, detection.straggler_steps, job.ranks):
        job.emit(f"replica.{'straggler' if hint.begins else 'keeps-pace'}", hint.replica, hint.reason)


def verdict_of(done: Iterable[Done], *, fail: bool = False) -> Verdict:
    """Everybody applies, or nobody: one result that is not finite skips the step for all, or (`fail`) ends the job."""
    if all(d.finite for d in done):
        return Verdict.APPLY
    return Verdict.FAIL if fail else Verdict.SKIP


def failure(job: Job, done: Mapping[str, Done]) -> str:
    """Why the job ends with the commit of this step although nobody wished it; empty if it does not."""
    if verdict_of(done.values(), fail=job.config.fail_on_nonfinite) is not Verdict.FAIL:
        return ""
    return f"step {job.step}: {_not_finite(done)}, and the job was told to fail then (--nonfinite fail)"


def _not_finite(done: Mapping[str, Done]) -> str:
    whose = ", ".join(sorted((name for name, d in done.items() if not d.own_finite), key=natural)[:8])
    return f"the gradients of {whose} were not finite" if whose else "the sum of the gradients was not finite"


def finish(job: Job, now: float, why: str, *, failed: bool = False) -> None:
    """The last commit is out: what closes now has ended, not died."""
    job.mode, job.reason, job.failed = Mode.FINISHED, why, failed
    job.finishing = why
    job.step -= 1  # the job is at its last step for ever
    job.timers.clear()
    job.timers["finish"] = now + job.config.finish_wait_s
    job.timers["dismiss"] = now
    job.emit("job.failed" if failed else "job.finished", job.config.job, why)
    if not job.persisted:
        job.rewrite_record(None)  # so that a restarted coordinator does not wait for a job that is over


# --- epoch change --------------------------------------------------------------------------------------------------


def _change_epoch(job: Job, now: float) -> bool:
    """Replace the membership in the middle of a step, if somebody is gone or a holding job has enough again."""
    short = len(job.members) - len(job.gone) < job.config.min_replicas
    joiners = _joiners_at_hold(job) if short else []
    if not job.gone and not joiners:
        return False
    survivors = [m for m in job.epoch.members if m.replica not in job.gone]
    if not survivors:
        _vanished(job, now)
        return True
    if not _state_survives(job):
        return False  # an epoch without those who hold the state would lose it; they may only be cut off
    if not job.can_persist(now):
        return False
    cancel_preparation(job, "the membership changed")
    lost = dict(job.gone)
    undo = snapshot(job, [r.name for r in joiners])
    job.table.give_slots(joiners, {m.slot for m in survivors}, job.config.replicas)
    epoch = job.mint_epoch([*survivors, *(r.member() for r in joiners)])
    vacate(job, {name: f"was lost ({reason})" for name, reason in lost.items()})
    watch_out(job, len(epoch.members), now)
    if not any(m.replica in job.deal.batches for m in epoch.members):
        job.deal = sampler.again(job.deal, epoch.names())
        job.dealt_to = epoch.members
    chain = chain_of(job, lost, [r.member() for r in joiners])
    enter_epoch(job, epoch, joiners, now, lost=lost, undo=undo)
    job.accounting.again(now)
    back = "with " + ", ".join(r.name for r in joiners)
    why = ", ".join(f"{name}: {reason}" for name, reason in lost.items()) or back
    announce(job, f"step {job.step} is reduced again ({why})", chain)
    return True


def _state_survives(job: Job) -> bool:
    """Somebody who is here holds the state before the running step: not only newcomers whom it has not reached yet."""
    return any(job.table.replicas[name].holds_state for name in job.contributors())


def enter_epoch(
    job: Job, epoch: EpochInfo, joiners: list[Replica], now: float, *, lost: dict[str, str], undo: Undo
) -> None:
    """Record `epoch`, then bring everybody into it at the running step: NewEpoch to those inside, Join to newcomers."""
    job.persist(job.record_of(epoch, job.step, job.deal, job.last_commit_epoch), undo)
    news = NewEpoch(
        term=job.term,
        epoch=epoch,
        step=job.step,
        deal=job.deal,
        lost=lost,
        last_commit_epoch=job.last_commit_epoch,
    )
    new = {r.name for r in joiners}
    for name in epoch.names():
        if name not in new:
            job.send_to(name, news)
    _enter(job, epoch, [r.member() for r in joiners], now)


def _enter(job: Job, epoch: EpochInfo, joined: Sequence[MemberInfo], now: float) -> None:
    """`epoch` is in force: newcomers are told to contribute, shadows whom to follow."""
    job.set_epoch(epoch)
    join = Join(term=job.term, epoch=epoch, step=job.step, deal=job.deal, last_commit_epoch=job.last_commit_epoch)
    for member in joined:
        replica = job.table.replicas[member.replica]
        job.ready.discard(replica.name)
        job.send(replica, join)
        cause = promoted(job, replica)
        replica.move(Cause.JOIN, now, f"contributes from step {job.step}" + (f": {cause}" if cause else ""))
        replica.holds_state = replica.step >= job.step - 1
        replica.step = job.step
        if cause:
            job.emit("replica.promoted", replica.name, cause)
        job.emit("replica.joined", replica.name, f"contributes from step {job.step} in epoch {epoch.id}")
        job.chains = job.chains.over(replica.name)
        job.stalls.begin(Incident(now, "replica-joined", replica.name, job.step, cause or "caught up"))
        job.accounting.joined(replica.name)
    refresh_sources(job, now)


def announce(job: Job, why: str, chain: Chain | None = None) -> None:
    names = ", ".join(job.epoch.names()[:8]) + ("" if len(job.members) <= 8 else f" and {len(job.members) - 8} more")
    job.emit("epoch.new", f"epoch {job.epoch.id}", f"{names}: {why}", chain=chain)


def looks_for_one(replica: Replica) -> bool:
    """It said that it holds no state, because it may find a checkpoint."""
    report = replica.hello.report if replica.hello is not None else None
    return report is not None and report.step == 0 and report.epoch == NO_EPOCH and report.deal is not None


def _joiners_at_hold(job: Job) -> list[Replica]:
    """Shadows that hold the state before the running step, if with them the job has enough."""
    able = [r for name in job.ready if (r := job.table.get(name)) is not None and r.step == job.step - 1]
    able.sort(key=lambda r: r.name)
    living = len(job.members) - len(job.gone)
    room = max(0, job.config.replicas - living)
    return able[:room] if living + min(room, len(able)) >= job.config.min_replicas else []


def _vanished(job: Job, now: float) -> None:
    """Nobody of the epoch is left. The running step is committed nowhere; whoever was dealt a batch may retry it."""
    why = ", ".join(f"{name}: {reason}" for name, reason in job.gone.items())
    cancel_preparation(job, "all contributors are gone")
    for replica in list(job.table):
        if replica.shadow and replica.conn is not None and replica.name not in job.ready and looks_for_one(replica):
            job.evict(replica, "all contributors are gone", now, rejoin=True, in_place=True)
    job.mode = Mode.RECOVERING
    job.reason = f"all contributors are gone ({why}): waiting for one of them, or for a caught-up replica"
    job.timers["gather"] = now + job.config.gather_s
    job.timers["recovery"] = now + job.config.recovery_wait_s
    job.timers["start-over"] = now + job.config.start_timeout_s
    job.timers.setdefault("hold-exit", now + job.config.hold_exit_s)
    job.hold_since, job.hold_reason, job.standings = None, "", {}
    job.waited = job.waited_long = job.waited_for_all = job.forced = False
    may_retry = tuple(m for m in job.dealt_to if (m.replica, m.incarnation) not in job.revoked)
    job.basis = Basis(job.epoch, job.step, job.deal, job.last_commit_epoch, may_retry)
    job.stalls.restart()
    job.emit("job.hold", job.config.job, job.reason)


# --- holding -------------------------------------------------------------------------------------------------------


def _why_hold(job: Job) -> tuple[Loss, str]:
    """Why no commit can come; an empty text if the job runs."""
    living = len(job.members) - len(job.gone)
    if job.gone and living and not _state_survives(job):
        who, gone = ", ".join(job.contributors()), ", ".join(sorted(job.gone))
        return Loss.VANISHED, f"the state has not reached {who} yet, and {gone} is gone: waiting for either"
    if job.gone and job.record_problem:
        return Loss.RECORD, f"{', '.join(sorted(job.gone))} is lost and {job.record_problem}"
    if living < job.config.min_replicas:
        return Loss.MIN_REPLICAS, f"{living} contributing, {job.config.min_replicas} needed (min-replicas)"
    return Loss.DIVERGED, job.diverged


def _watch_hold(job: Job, now: float) -> None:
    """Say when the job begins and ceases to hold."""
    job.hold_cause, reason = _why_hold(job)
    if reason == job.hold_reason:
        return
    job.hold_reason = reason
    if not reason:
        job.hold_since = None
        job.timers.pop("hold-exit", None)
        for replica in job.states((State.BLOCKED,)):
            replica.move(Cause.WELL, now, f"contributing since step {job.step}")
        job.emit("job.running", job.config.job, f"{len(job.contributors())} replicas contribute")
        return
    if job.hold_since is None:
        job.hold_since = now
        job.timers["hold-exit"] = now + job.config.hold_exit_s
    job.stalls.restart()
    job.emit("job.hold", job.config.job, reason, chain=job.chains.of(job.gone))
    hold = Hold(term=job.term, reason=reason)
    for name in job.contributors():
        replica = job.table.replicas[name]
        if job.is_member(replica):
            job.send(replica, hold)
            if replica.may(Cause.HOLD):
                replica.move(Cause.HOLD, now, reason)


# --- what a failed record takes back -------------------------------------------------------------------------------


def snapshot(job: Job, names: Sequence[str]) -> Undo:
    """A function that restores what is true now, and the named replicas, after the record could not be written."""
    kept = {
        field: getattr(job, field)
        for field in (  # a frozen value each, or one that a change replaces as a whole
            "epoch",
            "step",
            "deal",
            "last_commit_epoch",
            "record",
            "members",
            "done",
            "gone",
            "dealt_to",
            "last_commit",
            "last_wish",
            "unreachable",
            "diverged",
            "dispute",
            "mode",
            "reason",
            "preparation",
            "vacated",
            "chains",
            "promotable",
            "promote_by",
            "standings",
            "basis",
            "drains",
            "waited",
            "waited_long",
            "waited_for_all",
            "forced",
        )
    }
    cordoned, ready, slots = job.table.cordoned, set(job.ready), dict(job.table.slots)
    timers, arrivals = dict(job.timers), job.accounting.arrivals()
    states = {n: (r.state, r.reason, r.since, r.slot, r.step) for n in names if (r := job.table.get(n)) is not None}

    def undo(now: float) -> None:
        job.accounting.undone(kept["step"], arrivals)
        for field, value in kept.items():
            setattr(job, field, value)
        job.table.cordoned, job.ready, job.table.slots = cordoned, ready, slots
        job.timers = timers
        for name, state in states.items():
            replica = job.table.replicas[name]
            replica.state, replica.reason, replica.since, replica.slot, replica.step = state

    return undo
