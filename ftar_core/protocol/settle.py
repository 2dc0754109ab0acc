"""Starting a job, and carrying out what `recovery.decide` settled: the first epoch of a coordinator's life."""

from __future__ import annotations

from dataclasses import replace

from ftar_core.protocol import divergence, heirs, sampler
from ftar_core.protocol.commit import (
    announce,
    enter_epoch,
    failure,
    finish,
    last_reason,
    looks_for_one,
    snapshot,
    verdict_of,
)
from ftar_core.protocol.job import NEVER, Job, Mode, Undo
from ftar_core.protocol.joins import admit_shadow, send_catchup
from ftar_core.protocol.likeness import refuse_unlike, unlike
from ftar_core.protocol.membership import SHADOWS, Cause, Replica, State, natural
from ftar_core.protocol.recovery import Basis, Settled, Standing, Undecided, decide
from ftar_core.wire.ids import NO_EPOCH
from ftar_core.wire.messages import Commit, EpochInfo, Evicted, Hold, Join, NewEpoch, Report

FEW = 100  # up to so many members, what is missing is said by name at every step


def begin(job: Job, fresh: bool, now: float) -> None:
    """What a coordinator does first, from what its store holds."""
    record = job.record
    if record is None and fresh:
        job.timers["start"] = now + job.config.start_timeout_s
        job.timers["hold-exit"] = now + job.config.start_timeout_s + job.config.hold_exit_s
        job.reason = f"waiting for {job.config.replicas} replicas"
        return
    job.mode = Mode.RECOVERING
    job.timers["recovery"] = now + job.config.recovery_wait_s
    job.timers["start-over"] = now + job.config.start_timeout_s
    job.timers["hold-exit"] = now + job.config.recovery_wait_s + job.config.hold_exit_s
    if record is None:
        job.reason = "the record is lost: waiting for all members of the last epoch"
        return
    job.basis = Basis.of(record)
    job.step, job.deal, job.last_commit_epoch = record.first_step, record.deal, record.last_commit_epoch
    job.next_epoch = record.epoch.id.number + 1
    job.finishing = "the end of the job was decided before the coordinator restarted" if record.ended else ""
    for name in record.cordoned:
        replica = job.table.ensure(name, now, "")
        replica.state, replica.reason = State.DRAINED, "taken out of the job before the coordinator restarted"
    for member in record.epoch.members:
        replica = job.table.ensure(member.replica, now, "")
        replica.incarnation, replica.slot, replica.ranks = member.incarnation, member.slot, member.ranks
        replica.state, replica.reason = State.UNREACHABLE, "not yet back since the coordinator restarted"
    job.reason = f"waiting for the members of epoch {record.epoch.id}"


# --- start ---------------------------------------------------------------------------------------------------------


def try_start(job: Job, now: float) -> None:
    """Start with all replicas, or after the timeout with at least min-replicas. All begin with one and the same state:
    that of the lowest name; whoever was initialised otherwise, or comes later, catches up."""
    wanted, late = job.config.replicas, "start" not in job.timers
    needed = job.config.min_replicas if late else wanted
    connected = len(job.table.by_conn)
    job.reason = f"{connected} of {wanted} replicas have connected (min-replicas {job.config.min_replicas})"
    if connected < needed:
        return
    here = holders(job)
    if len(here) < needed or not job.can_persist(now):
        return
    if _spares_may_come(job, len(here), now):
        return
    _begin_with(job, here, "the job starts", now)


def holders(job: Job) -> list[Replica]:
    """Connected replicas that may begin the job: as they were initialised, or with the state of a checkpoint."""
    here = [r for r in job.table if r.conn is not None and r.hello is not None]
    return [r for r in here if _begins(_report(r))]


def _begins(report: Report) -> bool:
    """(A shadow's report is of no epoch either, but says nothing of what is to be dealt.)"""
    return report.epoch == NO_EPOCH and (report.step == 1 or (report.step > 1 and report.deal is not None))


def _begin_with(job: Job, here: list[Replica], why: str, now: float) -> None:
    """All whose state is that of the newest one's begin together; the others catch up."""
    wanted = job.config.replicas
    here = sorted(here, key=lambda r: (-_report(r).step, natural(r.name)))
    first = here[0]
    leader = first.hello
    assert leader is not None  # noqa: S101  # filtered by `holders`
    job.take_plan(leader)
    for replica in list(here):
        unfit = unlike(job, replica.hello) if replica.hello is not None else None
        if unfit is not None:
            refuse_plan(job, replica, unfit, now)
            here.remove(replica)
    step, digest = leader.report.step, leader.report.state_digest
    same = [r for r in here if (_report(r).step, _report(r).state_digest) == (step, digest)][:wanted]
    undo = snapshot(job, [r.name for r in job.table])
    job.table.give_slots(same, set())
    epoch = job.mint_epoch(r.member() for r in same)
    heirs.running(job)
    job.step, job.last_commit_epoch, job.dealt_to = step, NO_EPOCH, epoch.members
    if step > 1:
        job.kept.began(step - 1)
        why = f"{why} behind step {step - 1} of a checkpoint"
    for replica in same:
        replica.step = step
    job.deal = sampler.first(epoch.names(), leader.report.deal)
    if step > 1:
        job.committed(step - 1, NO_EPOCH)
    job.timers.pop("start", None)
    job.accounting.begins(job.step, now)
    enter_epoch(job, epoch, same, now, lost={}, undo=undo)
    announce(job, why)
    job.emit("job.running", job.config.job, f"started with {len(same)} replicas" if step == 1 else why)
    inside = {r.name for r in same}
    for replica in here:
        if replica.name not in inside:
            full, other = (
                f"the job has all {wanted} replicas it wants",
                f"its initial state is not that of {first.name}",
            )
            mine = (_report(replica).step, _report(replica).state_digest)
            admit_shadow(job, replica, full if mine == (step, digest) else other, now)


def _report(replica: Replica) -> Report:
    return replica.hello.report if replica.hello is not None else Report(step=0)


def _spares_may_come(job: Job, here: int, now: float) -> bool:
    """All replicas are here and the spares are not: wait a moment, so that it is not chance who becomes which."""
    wanted, spares = job.config.replicas, job.config.spares
    if not wanted <= here < wanted + spares:
        job.spares_by = NEVER
        job.timers.pop("spares", None)
        return False
    if job.spares_by == NEVER:
        job.spares_by = job.timers["spares"] = now + job.config.gather_s
    return now < job.spares_by


def refuse_plan(job: Job, replica: Replica, why: tuple[str, str], now: float) -> None:
    """Another model than the job's: nothing to be done from here."""
    conn, hello = replica.conn, replica.hello
    if conn is not None and hello is not None:
        job.table.detach(replica)
        refuse_unlike(job, conn, hello, why, now)
        if replica.state is not State.EVICTED and replica.may(Cause.EVICT):
            replica.move(Cause.EVICT, now, why[0])


# --- recovery ------------------------------------------------------------------------------------------------------


def try_settle(job: Job, now: float) -> None:
    """Decide, if enough is known; say what is missing otherwise."""
    if not job.can_persist(now):
        return
    if job.forced and job.basis is None and all(s.report.epoch == NO_EPOCH for s in job.standings.values()):
        job.mode, job.forced = Mode.STARTING, False  # nobody has anything: the operator begins anew
        job.timers.pop("recovery", None)
        return
    if _too_early(job):
        return
    waited = job.waited or _all_replaced(job)
    decision = decide(job.basis, job.standings, waited=waited, force=job.forced)
    if isinstance(decision, Settled):
        _settle(job, decision, now)
        return
    if job.epoch.members and waited and heirs.promote(job, now):
        return
    if decision.hopeless and waited and _start_over(job, now):
        return
    _undecided(job, decision, waited, now)


def _too_early(job: Job) -> bool:
    """Cheap signs that nothing can be decided yet: thousands of members come one by one."""
    if job.forced or job.waited:
        return False
    members = job.basis.epoch.members if job.basis is not None else ()
    return len(members) > FEW and (bool(job.unsaid) or len(job.table.by_conn) < len(members))


def _all_replaced(job: Job) -> bool:
    """A new process under the name of each missing member: the recorded ones are dead, there is no need to wait."""
    if job.basis is None:
        return False
    lives = dict(job.basis.lives())
    for name, incarnation in lives.items():
        replica = job.table.get(name)
        if replica is None or replica.conn is None:
            return False
        standing = job.standings.get(name)
        if replica.incarnation == incarnation and standing is None:
            return False
    return bool(lives)


def _undecided(job: Job, decision: Undecided, waited: bool, now: float) -> None:
    if decision.hopeless and waited:
        if job.finishing and not job.standings:
            job.stop(0, f"the job had ended ({job.finishing}) and no member is left")
            return
        looking = any(r.conn is not None and looks_for_one(r) for r in job.table)
        if job.waited_long and _all_replaced(job) and not job.forced and not looking:
            stop_job(job, f"{decision.reason}; every member has been restarted, so the state is gone")
            return
    job.forced = False
    if decision.reason == job.reason:
        return
    job.reason = decision.reason
    job.emit("job.hold", job.config.job, decision.reason)
    for name in job.standings:
        job.send_to(name, Hold(term=job.term, reason=decision.reason))


def _start_over(job: Job, now: float) -> bool:
    """Nobody is left who was in the job. Those who hold a checkpoint go on from it, or a hot spare that has followed
    further (heirs.py): what was trained since is lost, so first nobody may be expected with more. A new process stands
    in the place of each of them, and there was time for a coordinator of an older term, which may still lead them, to
    find that it is one; elsewhere all replicas that are wanted must be here, or the time is up in which a job starts,
    or the operator has decided."""
    basis = job.basis
    if basis is None or job.finishing or any(_knows_more(basis, n, s) for n, s in job.standings.items()):
        return False
    here = [r for r in holders(job) if _report(r).step > 1]
    replaced = job.waited and _all_replaced(job) and not any(r.conn is not None and looks_for_one(r) for r in job.table)
    enough = len(here) >= job.config.replicas and job.waited_long
    late = job.waited_for_all or job.forced
    kept = max((_report(r).step for r in here), default=1) - 1
    if (replaced or enough or late) and heirs.begin_again(job, basis, kept, now):
        return True
    if not here or not (replaced or enough or (late and len(here) >= job.config.min_replicas)):
        return False
    for replica in list(job.table):  # what a shadow has replayed since it came is no part of the job any more
        if replica.shadow and replica.conn is not None and replica not in here:
            job.evict(replica, "the job begins again from a checkpoint", now, rejoin=True, in_place=True)
    lost = max(0, basis.first_step - _report(max(here, key=lambda r: _report(r).step)).step)
    since = f", {lost} steps or more are trained again" if lost else ""
    heirs.forget_what_was_said(job)
    _begin_with(job, here, f"nobody of epoch {basis.epoch.id} is left: the job goes on{since}", now)
    job.timers["sort"] = now
    return True


def _knows_more(basis: Basis, name: str, standing: Standing) -> bool:
    """It is of the recorded epoch, or of a later one. Who was left behind before does not count."""
    epoch = standing.report.epoch
    return epoch != NO_EPOCH and ((name, standing.incarnation) in basis.lives() or epoch > basis.epoch.id)


def stop_job(job: Job, reason: str) -> None:
    """Give up: tell everybody who listens, then end."""
    for replica in job.table:
        if replica.conn is not None:
            job.send(replica, Evicted(term=job.term, reason=f"the job stops: {reason}", rejoin=True))
            job.close(replica, reason)
    job.stop(1, reason)


def _settle(job: Job, decision: Settled, now: float) -> None:
    """Persist first, then tell: so that a crash in between leaves a record that decides the same way."""
    members = [job.table.replicas[name] for name in decision.members]
    standings = job.standings
    decision = _unless_disputed(decision, standings)
    undo = snapshot(job, [r.name for r in job.table])
    if job.basis is None or decision.epoch != job.basis.epoch.id:
        job.table.slots.update({name: slot for slot, name in enumerate(decision.contributors)})
    job.table.give_slots(members, set())
    job.next_epoch = max(job.next_epoch, decision.epoch.number + 1)
    epoch = job.mint_epoch(r.member() for r in members)
    job.step, job.deal, job.last_commit_epoch = decision.step, decision.deal, decision.last_commit_epoch
    job.set_epoch(epoch)
    job.committed(job.step - 1, job.last_commit_epoch)
    job.dealt_to = epoch.members
    hello = next((r.hello for r in members if r.hello is not None), None)
    if hello is not None:
        job.take_plan(hello)
    heirs.running(job)
    last, failed = "", ""
    if decision.commit:
        divergence.settled(job, decision.step, {n: d for n in decision.members if (d := standings[n].done) is not None})
        done = {name: d for name in decision.members if (d := standings[name].done) is not None}
        failed = failure(job, done)
        last = failed or last_reason(job, decision.contributors)
    if decision.commit:
        _settle_by_commit(job, decision, epoch, standings, last=last, undo=undo)
    else:
        _settle_by_retry(job, decision, epoch, standings, undo)
    job.accounting.begins(job.step, now)
    for name in decision.contributors:
        absent = job.table.ensure(name, now, "")
        if absent.conn is None and absent.state is State.STARTING:
            absent.state, absent.reason = State.UNREACHABLE, "not back after the recovery"
    for replica in members:
        if replica.may(Cause.HELLO):
            replica.move(Cause.HELLO, now, "back")
        replica.move(Cause.JOIN, now, f"contributes from step {job.step}")
        replica.holds_state = True
        replica.step = job.step
    job.emit("coordinator.recovered", job.config.job, decision.reason)
    announce(job, decision.reason)
    job.emit("job.running", job.config.job, decision.reason)
    if last:
        finish(job, now, last, failed=bool(failed))
    job.timers["sort"] = now


def _unless_disputed(decision: Settled, standings: dict[str, Standing]) -> Settled:
    """Results that differ are not committed by a restart: where all who could have committed the step are here, and
    none has, it is reduced again, and a difference is looked into as in any step."""
    done = {n: d for n in decision.members if (d := standings[n].done) is not None}
    if decision.commit and divergence.differ(done) and set(decision.members) == set(decision.contributors):
        return replace(decision, commit=False, behind=(), reason=f"{decision.reason}; their results differ")
    return decision


def _settle_by_commit(
    job: Job, decision: Settled, epoch: EpochInfo, standings: dict[str, Standing], *, last: str, undo: Undo
) -> None:
    """All hold the result of the step: it is true, and the new epoch begins with the next."""
    done = [d for name in decision.members if (d := standings[name].done) is not None]
    deal = sampler.following(job.deal, decision.contributors, epoch.names())
    commit = Commit(
        term=job.term,
        step=decision.step,
        epoch=decision.epoch,
        contributors=decision.contributors,
        verdict=verdict_of(done, fail=job.config.fail_on_nonfinite),
        deal=deal,
        next=None if last else epoch,
        last=bool(last),
    )
    job.step, job.deal, job.last_commit_epoch = decision.step + 1, deal, decision.epoch
    job.committed(decision.step, decision.epoch)
    job.persist(job.record_of(epoch, job.step, deal, decision.epoch), undo)
    for name in decision.members:
        job.send_to(name, commit)
    job.last_commit = commit


def _settle_by_retry(job: Job, decision: Settled, epoch: EpochInfo, standings: dict[str, Standing], undo: Undo) -> None:
    """Those behind commit the step before, from their own results; then all reduce the step again."""
    if not any(name in job.deal.batches for name in epoch.names()):
        job.deal = sampler.again(job.deal, epoch.names())
    job.persist(job.record_of(epoch, job.step, job.deal, job.last_commit_epoch), undo)
    for name in decision.behind:
        report, done = standings[name].report, standings[name].done
        late = Commit(
            term=job.term,
            step=report.step,
            epoch=report.epoch,
            contributors=report.members,
            verdict=verdict_of([done] if done is not None else []),
            deal=job.deal,
        )
        job.send_to(name, late)
    news = NewEpoch(
        term=job.term,
        epoch=epoch,
        step=job.step,
        deal=job.deal,
        lost={n: "not back after the recovery" for n in decision.contributors if n not in decision.members},
        last_commit_epoch=job.last_commit_epoch,
    )
    join = Join(term=job.term, epoch=epoch, step=job.step, deal=job.deal, last_commit_epoch=job.last_commit_epoch)
    for name in decision.members:
        # Recorded, but the word never reached it: it holds the state as a shadow, or as it was initialised.
        job.send_to(name, join if standings[name].report.epoch == NO_EPOCH else news)


def dismiss_shadows(job: Job, now: float) -> None:
    """The job is over: who was still on its way in is needed no more."""
    for replica in job.states(SHADOWS):
        if replica.conn is not None:
            job.evict(replica, f"the job has {'failed' if job.failed else 'ended'}: {job.reason}", now, rejoin=False)


def sort_out(job: Job, now: float) -> None:
    """Everybody who is connected and no member, once the record is safe: newcomers catch up; lives that the job went on
    without are out."""
    for replica in list(job.table):
        if replica.conn is None or job.is_member(replica) or replica.hello is None:
            continue
        if replica.state in (State.FETCHING, State.REPLAYING, State.SPARE):
            send_catchup(job, replica)
        elif replica.hello.report.epoch != NO_EPOCH:
            job.evict(replica, "the job went on without it while it was away", now, rejoin=True, in_place=True)
        elif (why := unlike(job, replica.hello)) is not None:
            refuse_plan(job, replica, why, now)
        elif replica.may(Cause.FETCH):
            admit_shadow(job, replica, "catches up with the running job", now)
