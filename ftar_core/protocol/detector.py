"""Silence, and what it means. (Who is heard and does not get on: hangs.py.)

A process that dies closes its connection, and that is seen in milliseconds without any of this. Heartbeats find what
a closed connection cannot show: a host without power, a cut cable, a stopped process. They come from a native thread,
so a held GIL is no silence. A leader's beat tells of its other ranks, which beat to it (wire/heartbeat.py).

One silent replica is suspected, then evicted; of several ranks the quietest counts. Many at once, or a timer of our own
that fires late, is the coordinator's or the network's trouble: nobody died of that. Then everybody gets one more
period, and if they are silent still, the detector holds and says so; it never evicts half the job. A replica whose
heartbeats never arrived (UDP is blocked, say) is not judged by them at all.

Rejected: an adaptive (phi-accrual) threshold. Its merit is wide networks with drifting delays; here a fixed second
that an operator can read in `status` is worth more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftar_core.protocol import hangs
from ftar_core.protocol.config import Detection
from ftar_core.protocol.evictions import auto_evict
from ftar_core.protocol.job import NEVER, Job, Mode
from ftar_core.protocol.joins import back_off, cancel_if_involved
from ftar_core.protocol.membership import Cause, Replica, State, natural
from ftar_core.wire.accounting import Loss
from ftar_core.wire.messages import Unreachable


@dataclass(frozen=True)
class Verdict:
    suspects: tuple[str, ...]
    evict: tuple[str, ...]
    trouble: str  # many at once: why nobody is evicted


def judge(silent_s: Mapping[str, float], contributors: int, detection: Detection) -> Verdict:
    """`silent_s`: seconds since the last sign of life of each contributor that sends heartbeats."""
    suspects = tuple(sorted((n for n, s in silent_s.items() if s >= detection.suspect_after_s), key=natural))
    if (len(suspects) >= 2 and 2 * len(suspects) >= contributors) or len(suspects) == contributors > 0:
        names = ", ".join(suspects[:8])
        return Verdict(suspects, (), f"{len(suspects)} of {contributors} contributors are silent at once ({names})")
    return Verdict(suspects, tuple(n for n in suspects if silent_s[n] >= detection.evict_after_s), "")


def scan(job: Job, due: float, now: float) -> None:
    """Look at everybody's last sign of life; `due` is when this should have run."""
    detection = job.config.detection
    job.timers["scan"] = now + detection.heartbeat_interval_s
    if now - due >= detection.suspect_after_s / 2:
        _reset(job, now, f"the coordinator itself was late by {now - due:.1f} s")
        return
    if job.mode is not Mode.RUNNING:
        return
    silent = {r.name: now - r.quietest()[1] for r in job.table if r.conn is not None and r.beats}
    inside = {n: s for n, s in silent.items() if n in job.members}
    for name, silent_s in silent.items():
        if name not in inside and silent_s >= detection.evict_after_s:
            _evict_shadow(job, job.table.replicas[name], silent_s, now)
    verdict = judge(inside, len(job.members) - len(job.gone), detection)
    if verdict.trouble:
        _trouble(job, verdict, now)
        return
    if not verdict.suspects and now - job.strike_at > 2 * detection.suspect_after_s:
        job.strike_at = NEVER
    if job.network_trouble:
        job.emit("network.well", job.config.job, "heartbeats arrive again")
        job.network_trouble = ""
    _mark(job, verdict, inside, now)
    for name in verdict.evict:
        replica = job.table.replicas[name]
        why = f"{_who(replica)}silent for {inside[name]:.1f} s (no heartbeat, connection still open)"
        auto_evict(job, replica, why, now, Loss.SILENT)
    hangs.scan(job, now)


def _who(replica: Replica) -> str:
    """Which of several ranks it is; empty for a replica of one."""
    return f"rank {replica.quietest()[0]} is " if len(replica.ranks) > 1 else ""


def _evict_shadow(job: Job, replica: Replica, silent_s: float, now: float) -> None:
    why = f"{_who(replica)}silent for {silent_s:.1f} s while catching up"
    cancel_if_involved(job, replica.name, why)
    job.evict(replica, why, now, rejoin=True, in_place=True)


def _reset(job: Job, now: float, why: str) -> None:
    """Nobody's silence so far counts."""
    for replica in job.table:
        replica.last_life = replica.moved_at = now
        if replica.quiet is not None:
            replica.quiet = (replica.quiet[0], now)
    job.emit(
        "detector.reset", job.config.job, f"{why}: everybody gets another {job.config.detection.evict_after_s:g} s"
    )


def _trouble(job: Job, verdict: Verdict, now: float) -> None:
    """First time: one more period. After that: hold, and say so once."""
    if job.strike_at == NEVER:
        job.strike_at = now
        _reset(job, now, verdict.trouble)
        return
    for name in verdict.suspects:
        _suspect(job, job.table.replicas[name], "silent together with others", now)
    if not job.network_trouble:
        job.network_trouble = f"{verdict.trouble}; that is the network or this host rather than them: nobody is evicted"
        job.emit("network.trouble", job.config.job, job.network_trouble)


def _mark(job: Job, verdict: Verdict, silent_s: Mapping[str, float], now: float) -> None:
    for name in verdict.suspects:
        replica = job.table.replicas[name]
        which = f" of rank {replica.quietest()[0]}" if len(replica.ranks) > 1 else ""
        _suspect(job, replica, f"no heartbeat{which} for {silent_s[name]:.1f} s", now)
    for replica in job.states((State.SUSPECT,)):
        if replica.name not in verdict.suspects and replica.may(Cause.WELL):
            replica.move(Cause.WELL, now, "heartbeats arrive again")
            job.emit("replica.well", replica.name, replica.reason)


def _suspect(job: Job, replica: Replica, why: str, now: float) -> None:
    if replica.state is not State.SUSPECT and replica.may(Cause.SILENT):
        replica.move(Cause.SILENT, now, why)
        job.accounting.see(Loss.SILENT)
        job.emit("replica.suspect", replica.name, why)


# --- unreachable ---------------------------------------------------------------------------------------------------


def on_unreachable(job: Job, reporter: Replica, message: Unreachable, now: float) -> None:
    """No rail between two members works, while the coordinator sees both. Collect what others say, then judge."""
    if job.mode is not Mode.RUNNING or message.epoch != job.epoch.id or not job.is_member(reporter):
        return
    if message.peer not in job.members or message.peer == reporter.name:
        return
    job.unreachable[(reporter.name, message.peer)] = message.reason
    job.timers.setdefault("unreachable", now + job.config.detection.unreachable_wait_s)


def worst(reports: Mapping[tuple[str, str], str], living: set[str]) -> str | None:
    """Of the ends of dead links, the one with most reports against it; tie: the higher id. A report counts against both
    ends, since either may be the sick one, but two of one link count once."""
    links = {frozenset(pair) for pair in reports if set(pair) <= living}
    against: dict[str, int] = {}
    for link in links:
        for name in link:
            against[name] = against.get(name, 0) + 1
    return max(against, key=lambda n: (against[n], natural(n))) if against else None


def judge_unreachable(job: Job, now: float) -> None:
    """Put out the member that most others cannot reach."""
    name = worst(job.unreachable, set(job.contributors()))
    if name is None:
        job.unreachable = {}
        return
    replica = job.table.replicas[name]
    said = sorted({a if b == name else b for a, b in job.unreachable if name in (a, b)}, key=natural)
    detail = next(reason for pair, reason in job.unreachable.items() if name in pair)
    why = f"no working rail to {', '.join(said[:8])} ({detail})"
    if auto_evict(job, replica, why, now, Loss.UNREACHABLE, cause=Cause.LOST):
        back_off(replica, now)
    else:
        job.timers["unreachable"] = now + 1.0
