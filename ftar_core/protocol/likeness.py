"""Replicas that cannot train together are refused at the door, with what is different and what to do about it.

A Hello says the hash of the bucket plan, the number of ranks and the versions of what computes: enough to know that two
replicas do not fit, not enough to say where. Only then both are asked for an outline of their models, and the refusal
waits for that, a moment at most."""

from __future__ import annotations

from dataclasses import dataclass

from ftar_core.errors import WireError
from ftar_core.protocol.effects import Close, Send
from ftar_core.protocol.job import Job, Mode
from ftar_core.protocol.membership import Cause, Replica
from ftar_core.wire.messages import Describe, Hello, Outline, Refused, Welcome
from ftar_core.wire.outline import difference, unpack

WAIT_S = 2.0
AT_ONCE = 16  # so many newcomers are compared at a time; with more, somebody starts the wrong job on a whole cluster

NO_DETAIL = "its gradients have other names, shapes or types"
SAME_SCRIPT = "start it with the same script, arguments and library versions as the other replicas"


@dataclass
class Comparison:
    """A newcomer that does not fit, and a member that does. Outlines come in any order."""

    hello: Hello
    reference: str
    reference_conn: int
    due: float
    mine: Outline | None = None
    theirs: Outline | None = None


def unlike(job: Job, hello: Hello) -> tuple[str, str] | None:
    """Why this replica cannot train with the job's, and what to do about it; None if it can."""
    if not job.plan:
        return None
    for package, wanted in job.software.items():
        here = hello.software.get(package, wanted)
        if here != wanted and package.startswith("FTAR_"):
            return (
                f"{hello.replica} runs with {package}={here[:40]}, the job's replicas with {wanted[:40]}",
                f"set {package}={wanted[:40]} there",
            )
        if here != wanted:
            return (
                f"{hello.replica} runs {package} {here[:40]}, the job's replicas run {wanted[:40]}: their results "
                "would differ",
                f"install {package} {wanted[:40]} there",
            )
    if hello.plan != job.plan:
        if job.ranks and len(hello.ranks) != job.ranks:
            one, other = (f"{n} rank{'' if n == 1 else 's'}" for n in (len(hello.ranks), job.ranks))
            return (
                f"{hello.replica} has {one}, the job's replicas have {other} each",
                f"start {hello.replica} with WORLD_SIZE={job.ranks}",
            )
        return f"the model of {hello.replica} is not the job's: {NO_DETAIL}", SAME_SCRIPT
    data = hello.report.deal
    if data is not None and job.limit is not None and data.limit != job.limit:
        wanted, here = (f"{limit} batches" if limit else "any number of batches" for limit in (job.limit, data.limit))
        return (
            f"the job trains {wanted} of the data, {hello.replica} {here}",
            "start it with the same data, batch size and passes",
        )
    return None


def refuse_unlike(job: Job, conn: int, hello: Hello, why: tuple[str, str], now: float) -> None:
    """Refuse the replica behind `conn`, which is in no table (any more); with the difference, if it can be had."""
    reference = _reference(job, hello)
    if reference is None or reference.conn is None or hello.incarnation or len(job.comparing) >= AT_ONCE:
        _refuse(job, conn, hello, why, now)
        return
    due = now + WAIT_S
    job.comparing[conn] = Comparison(hello, reference.name, reference.conn, due)
    job.timers.setdefault("compare", due)
    welcome = Welcome(term=job.term, incarnation=0, proof=b"", coordinator_wait_s=job.config.member_wait_s)
    describe = Describe(term=job.term)
    job.out += [Send(conn, welcome), Send(conn, describe), Send(reference.conn, describe)]


def _reference(job: Job, hello: Hello) -> Replica | None:
    """A connected replica that has the job's plan, if the plan is what differs."""
    if hello.plan == job.plan or (job.ranks and len(hello.ranks) != job.ranks):
        return None
    names = job.contributors() if job.mode is Mode.RUNNING else sorted(job.table.replicas)
    there = (job.table.replicas[name] for name in names)
    return next((r for r in there if r.conn is not None and r.hello is not None and r.hello.plan == job.plan), None)


def on_outline(job: Job, conn: int, outline: Outline, now: float) -> None:
    """From a newcomer, or from the member that it is compared with."""
    for its_conn, comparison in list(job.comparing.items()):
        if conn == its_conn:
            comparison.mine = outline
        elif conn == comparison.reference_conn:
            comparison.theirs = outline
        if comparison.mine is not None and comparison.theirs is not None:
            _conclude(job, its_conn, comparison, now)


def late(job: Job, now: float) -> None:
    """Outlines that have not come are not waited for."""
    for conn, comparison in list(job.comparing.items()):
        if comparison.due <= now:
            _conclude(job, conn, comparison, now)
    if job.comparing:
        job.timers["compare"] = min(c.due for c in job.comparing.values())


def closed(job: Job, conn: int) -> None:
    job.comparing.pop(conn, None)


def _conclude(job: Job, conn: int, comparison: Comparison, now: float) -> None:
    del job.comparing[conn]
    hello = comparison.hello
    what = _difference(comparison)
    reason = f"the model of {hello.replica} is not the job's: {what or NO_DETAIL}"
    _refuse(job, conn, hello, (reason, SAME_SCRIPT), now)


def _difference(comparison: Comparison) -> str:
    mine, theirs, whose = comparison.mine, comparison.theirs, comparison.reference
    if mine is None or theirs is None:
        return ""
    try:
        what = difference(unpack(mine.parameters), unpack(theirs.parameters), whose)
    except WireError:
        return ""
    if what:
        return what
    ranks = [str(rank) for rank, (a, b) in enumerate(zip(mine.plans, theirs.plans, strict=False)) if a != b]
    return f"the parts of rank {', '.join(ranks[:8])} have other shapes than on {whose}" if ranks else ""


def _refuse(job: Job, conn: int, hello: Hello, why: tuple[str, str], now: float) -> None:
    reason, hint = why
    job.out += [Send(conn, Refused(reason=reason, retry=False, hint=hint)), Close(conn, reason)]
    text = f"{reason} ({hint})"
    replica = job.table.ensure(hello.replica, now, text)
    if replica.conn is None:  # not another process of that name, which fits
        if replica.may(Cause.EVICT):
            replica.move(Cause.EVICT, now, text)
        replica.reason = text
    job.emit("replica.refused", hello.replica, text)
