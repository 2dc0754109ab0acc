"""The coordinator of one job as a pure machine: events and the time in, effects out.

It keeps N replicas at one truth: which membership (epoch) reduces which step, and which step is committed. All of it is
in `Job`; this file hands each event to the part that knows about it, then lets `advance` do whatever the facts now ask
for.

The shell's duties: carry the effects out in order; on a failed `Persist` drop what is behind it and feed `RecordFailed`
before anything else; feed `Tick` at `deadline()`; answer `status` and `events` itself, from `view` and its numbered
events.
"""

from __future__ import annotations

from dataclasses import replace

from ftar_core.protocol import arrivals, detector, divergence, joins, likeness, operator, settle, timesheet
from ftar_core.protocol.accounting import Accounting
from ftar_core.protocol.commit import advance
from ftar_core.protocol.config import JobConfig
from ftar_core.protocol.effects import CoordinatorEffect
from ftar_core.protocol.events import (
    BeatSeen,
    ConnectionClosed,
    CoordinatorEvent,
    MemberHello,
    MemberMessage,
    Operator,
    OutdatedSeen,
    RecordFailed,
    Tick,
)
from ftar_core.protocol.job import Job, Mode, Undo
from ftar_core.protocol.kept import Kept
from ftar_core.protocol.membership import Replica, Table, first_incarnation
from ftar_core.protocol.record import Claim
from ftar_core.protocol.view import view as view_of
from ftar_core.wire.accounting import Loss
from ftar_core.wire.messages import (
    CaughtUp,
    CheckpointNotice,
    Done,
    Explained,
    HoldsState,
    JobView,
    Leaving,
    Message,
    Outline,
    Prepared,
    Progress,
    RailNotice,
    Unreachable,
)


class Coordinator:
    """One life of a job's coordinator. `claim` is what its store holds, with its own new term; `now` in seconds."""

    def __init__(
        self,
        config: JobConfig,
        claim: Claim,
        now: float,
        accounting: Accounting | None = None,
        kept: Kept | None = None,
    ) -> None:
        record = claim.record
        first = first_incarnation(claim.term, lost=record is None and not claim.fresh)
        table = Table(claim.term, next_incarnation=first, first_incarnation=first)
        if record is not None:
            table.next_incarnation = max(first, record.next_incarnation)
            table.slots, table.cordoned = dict(record.slots), frozenset(record.cordoned)
        book = accounting or Accounting(now, config.replicas)
        self.job = Job(config=config, term=claim.term, table=table, started=now, accounting=book, record=record)
        self.job.kept = kept or self.job.kept
        self.job.timers["scan"] = now + config.detection.heartbeat_interval_s
        self.job.timers["check"] = now + config.record_check_s
        settle.begin(self.job, claim.fresh, now)

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """What to do about `event`, in order. Events of unknown or closed connections do nothing."""
        job = self.job
        if job.mode is Mode.STOPPED:
            return []
        if isinstance(event, BeatSeen):
            return self._beat(event, now)
        undo, job.undo, job.persisted = job.undo, None, False
        if isinstance(event, RecordFailed):
            self._record_failed(event.reason, undo, now)
            self._due(now)
        else:
            self._due(now)
            if undo is not None and job.record_problem:
                job.record_problem = ""
                job.emit("record.written", job.config.job, "the record can be written again")
            self._dispatch(event, now)
        if job.timers.get("check", now + 1) <= now:
            self._check_record(now)
        if job.mode is Mode.FINISHED and not self._awaited():  # by now the event may have been the last goodbye
            job.stop(int(job.failed), f"the job has {'failed' if job.failed else 'ended'}: {job.reason}")
        # A record that fails takes all that is behind it in this list away: only what belongs to it may follow one.
        if job.mode is Mode.STARTING:
            settle.try_start(job, now)
        elif job.mode is Mode.RECOVERING:
            settle.try_settle(job, now)
        advance(job, now)
        timesheet.stand(job, now)
        effects, job.out = job.out, []
        return effects

    def deadline(self) -> float | None:
        """When to feed `Tick` at the latest, on the clock of `now`; None: never."""
        return min(self.job.timers.values(), default=None)

    def view(self, now: float, wall: float) -> JobView:
        """For `status`; `wall` is `now` in Unix seconds."""
        return view_of(self.job, now, wall)

    @property
    def stopped(self) -> bool:
        return self.job.mode is Mode.STOPPED

    # --- events

    def _beat(self, event: BeatSeen, now: float) -> list[CoordinatorEffect]:
        """Ten thousand a second: they are noted, and looked at when the detector is due."""
        replica = self.job.table.by_conn.get(event.conn)
        if replica is not None:
            replica.heard(event, now)
            timesheet.heard(self.job, replica)
        return []

    def _dispatch(self, event: CoordinatorEvent, now: float) -> None:
        job = self.job
        match event:
            case MemberHello(conn, hello):
                arrivals.on_hello(job, conn, hello, now)
            case MemberMessage(conn, Outline() as outline):
                likeness.on_outline(job, conn, outline, now)
            case MemberMessage(conn, message):
                replica = job.table.by_conn.get(conn)
                if replica is not None:
                    replica.last_life = now
                    self._message(replica, message, now)
            case ConnectionClosed(conn, why):
                likeness.closed(job, conn)
                replica = job.table.by_conn.get(conn)
                if replica is not None:
                    self._closed(replica, why, now)
            case Operator(conn, principal, request):
                operator.on_operator(job, conn, principal, request, now)
            case OutdatedSeen(promised):
                if promised > job.term:
                    job.stop(75, f"a member follows a newer coordinator (term {promised})", promised)
            case Tick() | RecordFailed():
                pass

    def _message(self, replica: Replica, message: Message, now: float) -> None:
        job = self.job
        match message:
            case Done():
                self._done(replica, message)
            case Explained():
                divergence.on_explained(job, replica, message)
            case Prepared(epoch=epoch):
                joins.on_prepared(job, replica, epoch)
            case CaughtUp():
                joins.on_caught_up(job, replica, message, now)
            case HoldsState(report=report):
                arrivals.on_state(job, replica, report)
            case CheckpointNotice():
                self._checkpoint(replica, message, now)
            case Progress():
                joins.on_progress(job, replica, message, now)
            case Unreachable():
                detector.on_unreachable(job, replica, message, now)
            case RailNotice(peer=peer, rail=rail, state=state, reason=reason):
                timesheet.rail(job, state)
                job.emit(f"rail.{state.lower()[:16]}", f"{replica.name}/{rail[:64]}", f"to {peer[:64]}: {reason[:200]}")
            case Leaving(reason=reason):
                self._leaving(replica, reason[:500], now)
            case _:
                pass  # messages of the handshake are the shell's

    def _checkpoint(self, replica: Replica, message: CheckpointNotice, now: float) -> None:
        job, step, path = self.job, message.step, message.path[:500]
        job.kept.told(message, replica.name, now)
        if message.problem:
            why = f"{replica.name} could not write it: {message.problem[:500]}; training goes on"
            job.emit("checkpoint.failed", f"step {step}", why)
            return
        megabytes = message.bytes / 1e6
        why = f"{replica.name} wrote {megabytes:.1f} MB, complete {message.seconds:.1f} s behind the step: {path}"
        job.emit("checkpoint.written", f"step {step}", why)

    def _done(self, replica: Replica, message: Done) -> None:
        """Counts only for the running step of the running epoch, from a living member of it."""
        job = self.job
        if job.mode is Mode.RECOVERING:
            standing = job.standings.get(replica.name)
            if standing is not None and standing.incarnation == replica.incarnation:
                report = standing.report
                if (message.step, message.epoch) == (report.step, report.epoch):
                    job.standings[replica.name] = replace(standing, done=message)
                    job.unsaid.discard(replica.name)
            return
        if job.mode is not Mode.RUNNING or message.epoch != job.epoch.id or message.step != job.step:
            return
        if job.is_member(replica):
            job.done[replica.name] = message
            replica.holds_state = True
            replica.loss, replica.step_ms, replica.step = message.loss, message.step_ms, message.step

    def _closed(self, replica: Replica, why: str, now: float) -> None:
        job = self.job
        if job.mode is Mode.FINISHED:
            job.table.detach(replica)
            return
        joins.cancel_if_involved(job, replica.name, f"{replica.name} is gone: {why}")
        job.lose(replica, f"connection closed: {why}", now)

    def _leaving(self, replica: Replica, why: str, now: float) -> None:
        job = self.job
        if job.mode is Mode.FINISHED:
            job.acknowledged.add(replica.name)
            return
        joins.cancel_if_involved(job, replica.name, f"{replica.name} leaves: {why}")
        job.revoked.add((replica.name, replica.incarnation))
        job.close(replica, why)
        job.lose(replica, f"it left: {why}", now, Loss.LEFT)

    def _record_failed(self, reason: str, undo: Undo, now: float) -> None:
        """Nothing behind the Persist was sent: take it back, say so, try again in a while."""
        job = self.job
        first = not job.record_problem
        job.record_problem = f"the record cannot be written: {reason}"
        if first:
            job.emit("record.failed", job.config.job, f"{job.record_problem}; no new epoch until it can")
        if undo is not None:
            undo(now)
        job.timers["record"] = now + job.config.record_retry_s

    # --- time

    def _due(self, now: float) -> None:
        """Run what is due. Timers that only wake `advance` need nothing more than to be forgotten."""
        job = self.job
        due = {name: at for name, at in job.timers.items() if at <= now and name != "check"}
        for name, at in due.items():
            del job.timers[name]
            if name == "scan":
                detector.scan(job, at, now)
            elif name == "preparation":
                joins.preparation_late(job, now)
            elif name == "unreachable":
                detector.judge_unreachable(job, now)
            elif name == "sort" and job.mode is Mode.RUNNING:
                settle.sort_out(job, now)
            elif name == "record":
                job.timers["check"] = now  # is it better by now?
            elif name == "compare":
                likeness.late(job, now)
            elif name == "dismiss":
                settle.dismiss_shadows(job, now)
            elif name == "start-over":
                job.waited_for_all = True
            elif name in ("recovery", "gather"):
                job.waited = True
                job.waited_long = job.waited_long or name == "recovery"
            elif name == "hold-exit":
                why = job.hold_reason or job.reason
                settle.stop_job(job, f"it held for {job.config.hold_exit_s:g} s: {why}")
                return
            elif name == "finish":
                job.stop(int(job.failed), f"the job has {'failed' if job.failed else 'ended'}: {job.reason}")
                return

    def _check_record(self, now: float) -> None:
        """Write the record anew. A disk that is full shows before an epoch depends on it, and a coordinator that was
        replaced while nothing happened learns it from its store and ends, instead of holding members for ever."""
        job = self.job
        job.timers["check"] = now + job.config.record_check_s
        if job.mode in (Mode.RUNNING, Mode.RECOVERING) and job.can_persist(now):
            job.rewrite_record(lambda at: None)

    def _awaited(self) -> bool:
        """Members that have not shown that they know the end: still connected, or cut off before they said so."""
        job = self.job
        names = job.last_commit.contributors if job.last_commit is not None else ()
        for name in names:
            replica = job.table.get(name)
            if replica is not None and (replica.conn is not None or name not in job.acknowledged):
                return True
        return False
