"""What operators ask for, and the guards that keep a request from ending the job. A refusal says why and what helps."""

from __future__ import annotations

from collections.abc import Callable

from ftar_core.protocol import hangs
from ftar_core.protocol.effects import Reply
from ftar_core.protocol.job import Job, Mode
from ftar_core.protocol.joins import cancel_if_involved, refresh_sources
from ftar_core.protocol.membership import ACTIVE, GONE, Cause, Replica, State
from ftar_core.protocol.spares import stand_in, watch_drain
from ftar_core.wire.messages import EVIDENCE_BYTES, Evicted, HangView, OpReply, OpRequest

Answer = tuple[str, str]  # code, text


def on_operator(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    """Carry out one request. `status`, `events` and `accounting` are answered `ok` here; the shell, which knows the
    date and numbers the events, adds the view and the list."""
    handler = _HANDLERS.get(request.op)
    if handler is None:
        reply(job, conn, request, ("unknown", f"no such request: {request.op}"))
        return
    handler(job, conn, principal, request, now)


def reply(job: Job, conn: int, request: OpRequest, answer: Answer) -> None:
    job.out.append(Reply(conn, OpReply(id=request.id, code=answer[0], text=answer[1])))


def _find(job: Job, request: OpRequest) -> Replica | Answer:
    replica = job.table.get(request.replica)
    if replica is None:
        known = ", ".join(sorted(job.table.replicas)[:8]) or "none yet"
        return "unknown", f"no replica {request.replica or '(none named)'} in job {job.config.job} (known: {known})"
    return replica


def _guard(job: Job, replica: Replica, request: OpRequest) -> Answer | None:
    """Not the last contributor, ever; not below min-replicas, unless forced; not more out than the request allows:
    nodes whose policies ask in one moment do so one after the other here, and the second one hears of the first."""
    leaving = len(job.draining()) - (1 if replica.state is State.DRAINING else 0)
    left = len(job.members) - len(job.gone) - leaving - 1
    force, size = request.force, max(job.config.replicas, len(job.members))
    out = size - min(size, left + len(job.ready))
    if request.max_share and out > request.max_share * size:
        return (
            "refused",
            f"{out} of {size} replicas would be out, at most {request.max_share:.0%} may be at one time",
        )
    if left < 1:
        return "refused", f"{replica.name} is the last contributor: without it the state of the job is gone"
    if left + len(job.ready) < job.config.min_replicas and not force:
        return (
            "refused",
            f"{left} contributors would be left, min-replicas is {job.config.min_replicas}; --force overrides this",
        )
    return None


def _reason(request: OpRequest, principal: str) -> str:
    return f"{request.reason or 'no reason given'} ({principal})" if principal else request.reason


def _drain(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    found = _find(job, request)
    if not isinstance(found, Replica):
        reply(job, conn, request, found)
        return
    refusal = _cannot_drain(job, found, request)
    if refusal is not None or request.dry_run:
        place = f" and {spare} would take its place" if (spare := stand_in(job)) else ""
        would = f"{found.name} would leave behind the commit of step {job.step}{place}; nothing would be lost"
        reply(job, conn, request, refusal or ("ok", would))
        return
    why = _reason(request, principal)
    job.chains = job.chains.asked(request)
    if found.state in ACTIVE:
        found.move(Cause.DRAIN, now, why)
        job.drains = job.drains | {found.name}
        if request.force:
            job.forced_drains.add(found.name)
        job.emit("replica.draining", found.name, why)
        watch_drain(job, now)
        refresh_sources(job, now)
        place = f" and {spare} takes its place" if (spare := stand_in(job)) else ""
        reply(job, conn, request, ("ok", f"{found.name} leaves behind the commit of step {job.step}{place}"))
        return
    _put_out_shadow(job, found, why, now)
    reply(job, conn, request, ("ok", f"{found.name} contributed nothing yet and is out"))
    _cordon(job, found, now)


def _cannot_drain(job: Job, replica: Replica, request: OpRequest) -> Answer | None:
    if job.mode is not Mode.RUNNING:
        return "conflict", f"the job is {job.mode.value}: {job.reason}"
    if replica.state is State.DRAINING:
        return "conflict", f"{replica.name} is draining already ({replica.reason})"
    if replica.state in GONE:
        return "conflict", f"{replica.name} is not in the job: {replica.state.value} ({replica.reason})"
    if replica.state not in ACTIVE:
        return None
    if job.hold_reason:
        return (
            "conflict",
            f"the job holds, so no commit will come to leave behind ({job.hold_reason}); evict it instead",
        )
    return _guard(job, replica, request)


def _put_out_shadow(job: Job, replica: Replica, why: str, now: float) -> None:
    if replica.conn is None:
        return
    cancel_if_involved(job, replica.name, f"{replica.name} was drained")
    job.ready.discard(replica.name)
    job.revoked.add((replica.name, replica.incarnation))
    replica.move(Cause.LEFT, now, why)
    job.send(replica, Evicted(term=job.term, reason=why, rejoin=False))
    job.close(replica, why)
    job.emit("replica.drained", replica.name, why)


def _cordon(job: Job, replica: Replica, now: float) -> None:
    """Keep its name out until `rejoin`, on disk if that can be."""
    before = job.table.cordoned
    job.table.cordoned = before | {replica.name}
    if job.record is not None and job.can_persist(now):
        # The answer is out: a cordon that could not be written holds as long as this coordinator lives, and says so.
        def undo(at: float) -> None:
            job.emit("record.failed", replica.name, "its cordon is not on disk: it ends with a coordinator restart")

        job.rewrite_record(undo)


def _evict(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    found = _find(job, request)
    if not isinstance(found, Replica):
        reply(job, conn, request, found)
        return
    refusal = _cannot_evict(job, found, request)
    back = "it stays out until it is let in again (`ftctl rejoin replica`, or the policy that asked)"
    if request.rejoin:
        back = "it may come back by itself"
    if refusal is not None or request.dry_run:
        would = f"{found.name} would be out at once and step {job.step} reduced again; {back}"
        reply(job, conn, request, refusal or ("ok", would))
        return
    why = f"evicted: {_reason(request, principal)}"
    job.chains = job.chains.asked(request)
    reply(job, conn, request, ("ok", f"{found.name} is out; {back}"))
    cancel_if_involved(job, found.name, why)
    if found.conn is not None:
        job.evict(found, why, now, rejoin=request.rejoin)
    if not request.rejoin:
        job.table.cordoned |= {found.name}
        if not job.gone and job.record is not None and job.can_persist(now):
            job.rewrite_record(lambda at: None)  # with a member gone, the record of the next epoch holds it


def _cannot_evict(job: Job, replica: Replica, request: OpRequest) -> Answer | None:
    if job.mode not in (Mode.RUNNING, Mode.STARTING):
        return "conflict", f"the job is {job.mode.value}: {job.reason}"
    if replica.state in GONE:
        if not request.rejoin and replica.name not in job.table.cordoned:
            return None  # keep it out
        return "conflict", f"{replica.name} is not in the job: {replica.state.value} ({replica.reason})"
    if replica.state not in ACTIVE or not job.is_member(replica):
        return None
    others = [job.table.replicas[name] for name in job.contributors() if name != replica.name]
    if others and not any(r.holds_state for r in others):
        return "refused", f"the state of the job has not reached {', '.join(r.name for r in others)} yet"
    return _guard(job, replica, request)


def _rejoin(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    found = _find(job, request)
    name = request.replica
    cordoned = name in job.table.cordoned
    if not isinstance(found, Replica):
        if not cordoned:
            reply(job, conn, request, found)
            return
        found = job.table.ensure(name, now, "")
        found.state = State.DRAINED
    if found.state not in GONE and not cordoned:
        reply(job, conn, request, ("conflict", f"{name} is in the job already: {found.state.value} ({found.reason})"))
        return
    if request.dry_run:
        reply(job, conn, request, ("ok", f"{name} would be let in again when its process starts"))
        return
    why = f"may rejoin: {_reason(request, principal)}; waiting for its process"
    before = (job.table.cordoned, found.state, found.reason, found.since)
    job.table.cordoned = job.table.cordoned - {name}

    def undo(at: float) -> None:
        job.table.cordoned, found.state, found.reason, found.since = before
        reply(job, conn, request, ("failed", f"the record could not be written: {job.record_problem}"))

    if cordoned and job.record is not None:
        if not job.can_persist(now):
            job.table.cordoned = before[0]
            reply(job, conn, request, ("failed", f"the record cannot be written: {job.record_problem}"))
            return
        job.rewrite_record(undo)
    found.backoff_s = found.not_before = 0.0
    if found.may(Cause.ALLOW):
        found.move(Cause.ALLOW, now, why)
    job.chains = job.chains.asked(request)
    job.emit("replica.allowed", name, why)
    reply(job, conn, request, ("ok", f"{name} is let in again when its process starts"))


def _finish(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    if job.mode is not Mode.RUNNING:
        reply(job, conn, request, ("conflict", f"the job is {job.mode.value}: {job.reason}"))
        return
    if request.dry_run:
        reply(job, conn, request, ("ok", f"step {job.step} would be the last"))
        return
    if not job.can_persist(now):
        reply(job, conn, request, ("failed", f"the record cannot be written: {job.record_problem}"))
        return
    job.finishing = f"finished on request: {_reason(request, principal)}"

    def undo(at: float) -> None:
        job.finishing = ""
        reply(job, conn, request, ("failed", f"the record could not be written: {job.record_problem}"))

    job.rewrite_record(undo)
    reply(job, conn, request, ("ok", f"step {job.step} is the last"))


def _force_quorum(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    if job.mode is not Mode.RECOVERING:
        reply(job, conn, request, ("conflict", f"the coordinator is not recovering: the job is {job.mode.value}"))
        return
    if not job.standings:
        reply(job, conn, request, ("conflict", "no member is connected: there is nobody to go on with"))
        return
    here = ", ".join(sorted(job.standings))
    warning = "steps that only absent members committed are trained again"
    if request.dry_run:
        reply(job, conn, request, ("ok", f"the job would go on with what {here} hold; {warning}"))
        return
    job.forced = True
    job.emit("coordinator.forced", job.config.job, f"{_reason(request, principal)}: goes on with {here}; {warning}")
    reply(job, conn, request, ("ok", f"going on with {here}; members that are absent now are out"))


def _restarts(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    found = _find(job, request)
    if not isinstance(found, Replica):
        reply(job, conn, request, found)
        return
    job.chains = job.chains.asked(request, "restart")
    reply(job, conn, request, ("ok", "noted"))


def _hangs(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    found = tuple(
        HangView(
            replica=name, incarnation=hang.incarnation, rank=hang.rank, wanted=not hang.evidence, evicted=hang.evicted
        )
        for name, hang in sorted(job.hangs.items())
    )
    job.out.append(Reply(conn, OpReply(id=request.id, code="ok", text=f"{len(found)} hung", hangs=found)))


def _evidence(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    text = request.reason.encode()[:EVIDENCE_BYTES].decode(errors="ignore")
    useless = hangs.on_evidence(job, request.replica, text, now)
    reply(job, conn, request, ("ok", "taken") if useless is None else ("conflict", useless))


def _shell_answers(job: Job, conn: int, principal: str, request: OpRequest, now: float) -> None:
    reply(job, conn, request, ("ok", ""))


_HANDLERS: dict[str, Callable[[Job, int, str, OpRequest, float], None]] = {
    "status": _shell_answers,
    "events": _shell_answers,
    "accounting": _shell_answers,
    "hangs": _hangs,
    "evidence": _evidence,
    "drain": _drain,
    "evict": _evict,
    "rejoin": _rejoin,
    "restarts": _restarts,
    "finish": _finish,
    "force-quorum": _force_quorum,
}
