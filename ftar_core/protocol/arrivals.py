"""Who knocks: a Hello is a new process, a known life that comes back, or an old one that must be told that it is out.

Two connections under one name. A known incarnation that connects again replaces its old connection: it is the same
process and its network broke before ours noticed; it gets again what the old connection may have swallowed. A **new**
process (incarnation 0) under a name that is still connected means that the old process is dead and its host did not say
so, or that two processes were given the same name. Signs of life tell the two apart: while the old one shows some, the
newcomer is asked to try again, so that a slip in a configuration cannot kill a healthy replica over and over; once the
old one has been silent for `suspect_after_s`, it is evicted and the newcomer takes the name.

A life that was lost and comes back late (it was frozen, or cut off) is out: the others went on without it. It is told
so, forgets its incarnation, and asks for a new one: the same process is then a shadow, and if the state it holds is one
of the job's history (joins.py) it needs only what it has missed. A life that was put out for what it did (its result
differed, an operator evicted it) has to start again instead. Only while the coordinator recovers are returning lives
heard, because then they are the truth.
"""

from __future__ import annotations

import msgspec

from ftar_core.protocol.effects import Close, Send
from ftar_core.protocol.job import Job, Mode
from ftar_core.protocol.joins import admit_shadow, cancel_if_involved
from ftar_core.protocol.likeness import refuse_unlike, unlike
from ftar_core.protocol.membership import GONE, SHADOWS, Cause, Replica, State
from ftar_core.protocol.recovery import Standing
from ftar_core.wire.accounting import Loss
from ftar_core.wire.ids import NO_EPOCH, valid_name
from ftar_core.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Evicted,
    Hello,
    Hold,
    Join,
    NewEpoch,
    Refused,
    Report,
    Welcome,
)


def on_hello(job: Job, conn: int, hello: Hello, now: float) -> None:
    """Admit, resume or refuse the replica behind connection `conn`."""
    refusal = _unfit(job, hello)
    if refusal is not None:
        _refuse(job, conn, refusal)
        return
    unfitness = unlike(job, hello)
    if unfitness is not None:
        refuse_unlike(job, conn, hello, unfitness, now)
        return
    replica = job.table.ensure(hello.replica, now, "connected")
    if job.mode is Mode.FINISHED:
        _after_the_end(job, conn, replica, hello, now)
    elif hello.replica in job.table.cordoned:
        why = f"{hello.replica} was taken out of the job; `ftctl rejoin replica {hello.replica}` lets it in again"
        if replica.conn is None and replica.may(Cause.LEFT):
            replica.move(Cause.LEFT, now, why)
        _turn_away(job, conn, hello, why, rejoin=False)
    elif job.mode is Mode.RECOVERING or (job.mode is Mode.STARTING and _knows_more(job, hello, now)):
        _while_recovering(job, conn, replica, hello, now)
    elif _is_new(job, hello):
        _new_life(job, conn, replica, hello, now)
    elif _is_present_life(job, replica, hello):
        _come_back(job, conn, replica, hello, now)
    else:
        why = "the job went on without this process while it was away"
        if replica.conn is None and replica.may(Cause.LOST):
            replica.move(Cause.LOST, now, f"{why}; it was told to come back as a new one")
        _turn_away(job, conn, hello, why, rejoin=True)


def _unfit(job: Job, hello: Hello) -> Refused | None:
    if hello.job != job.config.job:
        return Refused(reason=f"this is job {job.config.job}, not {hello.job}", retry=False, hint="check FTAR_JOB")
    if hello.version != PROTOCOL_VERSION:
        why = f"protocol version {hello.version}, this coordinator speaks {PROTOCOL_VERSION}"
        return Refused(reason=why, retry=False, hint="install the same ftctl everywhere")
    if not valid_name(hello.replica):
        return Refused(reason="not a replica name", retry=False, hint="check FTAR_REPLICA")
    if job.mode is Mode.STOPPED:
        return Refused(reason=f"the coordinator stops: {job.reason}", retry=True)
    return None


def _refuse(job: Job, conn: int, refusal: Refused) -> None:
    job.out += [Send(conn, refusal), Close(conn, refusal.reason)]


def _turn_away(job: Job, conn: int, hello: Hello, why: str, *, rejoin: bool) -> None:
    """This life is out; a new one may come if `rejoin`."""
    in_place = rejoin and (hello.replica, hello.incarnation) not in job.condemned
    job.out += [
        Send(conn, _welcome(job, hello.incarnation)),
        Send(conn, Evicted(term=job.term, reason=why, rejoin=rejoin, in_place=in_place)),
        Close(conn, why),
    ]


def _welcome(job: Job, incarnation: int) -> Welcome:
    return Welcome(
        term=job.term,
        incarnation=incarnation,
        proof=b"",
        heartbeat_interval_ms=round(job.config.detection.heartbeat_interval_s * 1000),
        coordinator_wait_s=job.config.member_wait_s,
    )


def _accept(job: Job, conn: int, replica: Replica, hello: Hello, *, incarnation: int, now: float) -> None:
    """From here on `conn` speaks for this life of the replica."""
    if replica.conn is not None:
        job.close(replica, "the same replica has connected anew")
    job.table.attach(replica, conn, now)
    replica.incarnation, replica.ranks, replica.hello = incarnation, hello.ranks, hello
    replica.unproven = True
    job.hangs.pop(replica.name, None)
    replica.last_step_wish = hello.last_step
    job.send(replica, _welcome(job, incarnation))


def _is_new(job: Job, hello: Hello) -> bool:
    """A process that was never in an epoch: fresh, or a shadow that an earlier life of the coordinator admitted."""
    if hello.incarnation == 0:
        return True
    return hello.report.epoch == NO_EPOCH and hello.incarnation < job.table.first_incarnation


def _knows_more(job: Job, hello: Hello, now: float) -> bool:
    """A new job's store is empty, but so is a lost one: a member that was in an epoch shows that the job is not new."""
    if hello.report.epoch == NO_EPOCH:
        return False
    job.mode, job.reason = (
        Mode.RECOVERING,
        f"the record is lost: {hello.replica} is at step {hello.report.step} already",
    )
    job.emit("record.lost", job.config.job, job.reason)
    job.timers.pop("start", None)
    job.timers["recovery"] = now + job.config.recovery_wait_s
    job.timers["hold-exit"] = now + job.config.recovery_wait_s + job.config.hold_exit_s
    for replica in job.table:
        if replica.conn is not None and replica.hello is not None:
            job.standings[replica.name] = Standing(replica.incarnation, replica.hello.report)
    return True


def _is_present_life(job: Job, replica: Replica, hello: Hello) -> bool:
    if hello.incarnation != replica.incarnation or (replica.name, replica.incarnation) in job.revoked:
        return False
    if hello.report.epoch == NO_EPOCH:
        return True  # it never contributed: a shadow, or one whom the word of its first epoch did not reach
    member = job.members.get(replica.name)
    if member is None or member.incarnation != replica.incarnation:
        return False
    return replica.state not in GONE or replica.name in job.gone


def _new_life(job: Job, conn: int, replica: Replica, hello: Hello, now: float) -> None:
    if replica.conn is not None and not _supersede(job, conn, replica, now):
        return
    replica.move(Cause.HELLO, now, "connected")
    replica.loss = replica.step_ms = None
    replica.step = 0
    _accept(job, conn, replica, hello, incarnation=job.table.mint(), now=now)
    if job.mode is Mode.RUNNING:
        admit_shadow(job, replica, "catches up with the running job", now)
    else:
        why = f"the job starts when {job.config.replicas} replicas are here"
        job.send(replica, Hold(term=job.term, reason=why, restore=hello.report.step == 0))


def _supersede(job: Job, conn: int, replica: Replica, now: float) -> bool:
    """A new process under a connected name: True if the old one is out of the way now."""
    silent_s = now - replica.last_life
    if replica.state in SHADOWS and not replica.beats:
        silent_s = max(
            silent_s, job.config.detection.suspect_after_s
        )  # it costs nobody anything to believe the new one
    if silent_s < job.config.detection.suspect_after_s:
        why = f"{replica.name} is connected already and showed life {silent_s:.1f} s ago"
        _refuse(job, conn, Refused(reason=why, retry=True, hint="are two processes named alike? see FTAR_REPLICA"))
        return False
    why = f"a new process of {replica.name} has connected and the old one is silent for {silent_s:.1f} s"
    cancel_if_involved(job, replica.name, why)
    job.evict(replica, why, now, rejoin=True, loss=Loss.SILENT)
    return True


def _come_back(job: Job, conn: int, replica: Replica, hello: Hello, now: float) -> None:
    """The same life on a new connection."""
    was_gone = replica.state in GONE
    if replica.name in job.members and job.members[replica.name].incarnation == replica.incarnation:
        _accept(job, conn, replica, hello, incarnation=replica.incarnation, now=now)
        if was_gone:
            replica.move(Cause.JOIN, now, "back before the others went on without it")
        job.gone.pop(replica.name, None)
        if not _resync(job, replica, hello):
            why = f"it is at step {hello.report.step}, the job at {job.step}"
            job.evict(replica, why, now, rejoin=True, in_place=True, loss=Loss.SILENT)
        return
    cancel_if_involved(job, replica.name, f"{replica.name} has connected anew")
    replica.move(Cause.HELLO, now, "connected again")
    _accept(job, conn, replica, hello, incarnation=replica.incarnation, now=now)
    if job.mode is Mode.RUNNING:
        admit_shadow(job, replica, "catches up with the running job", now)


def _resync(job: Job, replica: Replica, hello: Hello) -> bool:
    """Say again what the old connection may have swallowed. False: it cannot be brought in step."""
    report = hello.report
    news = NewEpoch(
        term=job.term,
        epoch=job.epoch,
        step=job.step,
        deal=job.deal,
        lost={},
        last_commit_epoch=job.last_commit_epoch,
    )
    join = Join(term=job.term, epoch=job.epoch, step=job.step, deal=job.deal, last_commit_epoch=job.last_commit_epoch)
    if report.step == job.step:
        if report.epoch == NO_EPOCH and job.step > 0:
            job.send(replica, join)
        elif report.epoch != job.epoch.id:
            job.send(replica, news)
        return True
    last: Commit | None = job.last_commit
    if report.step != job.step - 1 or not report.done or last is None or report.epoch != last.epoch:
        return False
    job.send(replica, msgspec.structs.replace(last, next=None, deal=job.deal))
    if last.epoch != job.epoch.id:
        job.send(replica, news)
    return True


def _while_recovering(job: Job, conn: int, replica: Replica, hello: Hello, now: float) -> None:
    """Lives that were in an epoch are witnesses; everybody else waits for what they say."""
    if (replica.name, hello.incarnation) in job.revoked:
        _turn_away(job, conn, hello, "this process was put out of the job", rejoin=True)
        return
    known = hello.incarnation != 0
    present = job.standings.get(replica.name)
    if replica.conn is not None and present is not None and hello.incarnation != present.incarnation:
        if not known or _rank(job, replica.name, hello.incarnation, hello) < _rank(
            job, replica.name, present.incarnation, replica.hello
        ):
            why = f"{replica.name} is connected already, and its older process may be needed for the recovery"
            _refuse(job, conn, Refused(reason=why, retry=True))
            return
        job.evict(replica, f"an older process of {replica.name} is needed for the recovery", now, rejoin=True)
    if replica.may(Cause.HELLO):
        replica.move(Cause.HELLO, now, "back; the coordinator recovers")
    elif replica.state is not State.STARTING:
        job.lose(replica, "connected anew", now)
        replica.move(Cause.HELLO, now, "back; the coordinator recovers")
    job.ready.discard(replica.name)
    incarnation = hello.incarnation if known else job.table.mint()
    _accept(job, conn, replica, hello, incarnation=incarnation, now=now)
    replica.step = hello.report.step
    job.standings[replica.name] = Standing(incarnation, hello.report)
    (job.unsaid.add if hello.report.done else job.unsaid.discard)(replica.name)
    nothing = hello.report.step == 0 and hello.report.epoch == NO_EPOCH
    job.send(replica, Hold(term=job.term, reason=job.reason or "the coordinator recovers", restore=nothing))


def on_state(job: Job, replica: Replica, report: Report) -> None:
    """A member that waits for the job has looked for a checkpoint. (One that the job has begun without fetches its
    state from the others, whatever it has found.)"""
    hello = replica.hello
    if hello is None or job.mode not in (Mode.STARTING, Mode.RECOVERING):
        return
    if report.epoch != NO_EPOCH or hello.report.epoch != NO_EPOCH or report.done:
        return
    replica.hello = msgspec.structs.replace(hello, report=report)
    if replica.name in job.standings:
        job.standings[replica.name] = Standing(replica.incarnation, report)
    if report.step > 1:
        job.emit("replica.restored", replica.name, f"holds the state after step {report.step - 1} of a checkpoint")


def _rank(job: Job, name: str, incarnation: int, hello: Hello | None) -> tuple[object, ...]:
    """Which of two lives of a name is the better witness: a recorded one, then the later epoch, then the later life."""
    recorded = job.basis is not None and (name, incarnation) in job.basis.lives()
    epoch = hello.report.epoch if hello is not None else NO_EPOCH
    return (recorded, epoch, incarnation)


def _after_the_end(job: Job, conn: int, replica: Replica, hello: Hello, now: float) -> None:
    """A member that missed the last commit gets it; nobody else is needed any more."""
    last, report = job.last_commit, hello.report
    member = job.members.get(replica.name)
    if (
        last is None
        or member is None
        or member.incarnation != hello.incarnation
        or not report.done
        or (report.step, report.epoch) != (last.step, last.epoch)
    ):
        _refuse(job, conn, Refused(reason=f"the job has ended: {job.reason}", retry=False))
    else:
        _accept(job, conn, replica, hello, incarnation=hello.incarnation, now=now)
        job.send(replica, last)
