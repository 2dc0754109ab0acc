"""Who keeps the others waiting although it lives: hung, slow, or busy with something that may take its time.

In a ring everybody waits for the slowest, so the hung one is not who waits but who has produced least, once all others
have waited for max(hung_after_s, hung_factor x median step). Heartbeats come from native threads, so a rank that holds
the GIL or sits in a lock goes on saying where it stands; of a replica with several ranks, the one that stands furthest
behind counts (wire/heartbeat.py). A dead process closes its connection, and a frozen one sends no heartbeats: neither
comes here, and where somebody is silent, nobody is called hung, since the others may be waiting for that one.

A phase with a budget (start-up, first steps, checkpoint, evaluation, compiling) is no hang while the budget lasts. When
it is over the rank's own heartbeats say so, and it counts like any other.

A hung replica is shown, and evicted only if the operator opted in. Its evidence comes first: the agent of its node is
given `evidence_wait_s` to say what its threads do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftar_core.protocol.evictions import auto_evict
from ftar_core.protocol.job import Job
from ftar_core.protocol.membership import Cause, Replica, State
from ftar_core.wire.accounting import Loss
from ftar_core.wire.heartbeat import BUSY, Phase


@dataclass(frozen=True)
class Standing:
    """Where a contributor stands, by the heartbeats of its slowest rank. `still_s`: since that changed."""

    name: str
    step: int
    produced: int
    phase: Phase
    still_s: float
    phase_s: float = 0.0  # since its phase began
    done: bool = False  # has reported the running step
    overdue: bool = False  # its phase has lasted longer than its budget
    rank: int = 0
    sharing: int = 1  # so many of its `ranks` stand there
    ranks: int = 1

    @property
    def exempt(self) -> bool:
        return self.phase not in BUSY and not self.overdue

    def key(self) -> tuple[int, int, bool, int]:
        """Less is further behind."""
        return self.step, self.produced, self.done, int(self.phase) if self.phase in BUSY else 0


def judge(standings: Sequence[Standing], limit_s: float) -> dict[str, str]:
    """Who is hung, and why. Empty where nobody is, or nobody stands out."""
    if len(standings) < 2 or any(s.exempt and not s.done for s in standings):
        return {}
    least = min(s.key() for s in standings)
    behind = [s for s in standings if s.key() == least]
    others = [s for s in standings if s.key() != least]
    if not others or (len(behind) > 1 and 2 * len(behind) >= len(standings)):
        return {}
    waited_s = min(s.still_s for s in others)
    if waited_s < limit_s:
        return {}
    # Who has just come out of a checkpoint has not kept anybody waiting yet with what it does now.
    return {s.name: _why(s, waited_s, limit_s) for s in behind if s.overdue or s.phase_s >= limit_s}


def _why(s: Standing, waited_s: float, limit_s: float) -> str:
    who = "it"
    if s.ranks > 1:
        who = f"rank {s.rank}" if s.sharing == 1 else f"rank {s.rank} and {s.sharing - 1} more of its {s.ranks} ranks"
        who = f"all of its {s.ranks} ranks" if s.sharing >= s.ranks else who
    verb = "have" if s.sharing > 1 else "has"
    if s.overdue:
        what = f"{who} {verb} been in phase {s.phase.name.lower()} for {s.phase_s:.0f} s, longer than its budget"
    elif s.still_s < min(limit_s, waited_s) / 2:
        what = f"{who} {verb} produced {s.produced} buckets of step {s.step}, the last one {s.still_s:.1f} s ago: slow"
    else:
        what = f"{who} {verb} produced {s.produced} buckets of step {s.step} and then nothing for {s.still_s:.0f} s"
    where = "" if s.overdue else f" (phase {s.phase.name.lower()})"
    return f"{what}{where}, while all others wait for {waited_s:.0f} s"


def standing(job: Job, replica: Replica, now: float) -> Standing:
    return Standing(
        name=replica.name,
        step=replica.beat_step,
        produced=replica.produced,
        phase=Phase(replica.phase),
        still_s=now - replica.moved_at,
        phase_s=now - replica.phase_at,
        done=replica.name in job.done,
        overdue=replica.overdue,
        rank=replica.slowest,
        sharing=replica.sharing,
        ranks=len(replica.ranks),
    )


def limit_s(job: Job) -> float:
    """How long the others wait before somebody is called hung."""
    detection = job.config.detection
    return max(detection.hung_after_s, detection.hung_factor * (job.stalls.median_step_s() or 0.0))


def scan(job: Job, now: float) -> None:
    """Mark who is hung, clear who is not any more; evict, where the operator opted in and the evidence is here."""
    living = [r for name in job.contributors() if (r := job.table.get(name)) is not None]
    _say_overdue(job, living, now)
    found: dict[str, str] = {}
    limit = limit_s(job)
    if (
        not job.hold_reason
        and not most_move([now - r.moved_at for r in living], limit)
        and all(r.beats and r.state is not State.SUSPECT for r in living)
    ):
        found = judge([standing(job, r, now) for r in living], limit)
    for replica in job.states((State.HUNG,)):
        if replica.name not in found:
            replica.move(Cause.WELL, now, "it goes on")
            job.emit("replica.well", replica.name, replica.reason)
            job.hangs.pop(replica.name, None)
    for name, why in found.items():
        replica = job.table.replicas[name]
        hang = job.hangs.get(name)
        if replica.state is State.HUNG and hang is not None:
            hang.why = why
            if name not in job.withheld:
                replica.reason = why
        elif replica.may(Cause.STUCK):
            replica.move(Cause.STUCK, now, why)
            job.accounting.see(Loss.HUNG)
            job.hangs[name] = Hang(replica.incarnation, replica.slowest, why, now)
            job.emit("replica.hung", name, why)
    _evict_hung(job, now)


def most_move(still_s: Sequence[float], limit_s: float) -> bool:
    """Then `judge` finds nobody: whoever moves has to be behind all that wait, and half of all is not behind. Nearly
    always so, and cheap: this runs at every heartbeat interval, for a thousand replicas."""
    moving = sum(s < limit_s for s in still_s)
    return moving > 1 and 2 * moving >= len(still_s)


def _say_overdue(job: Job, living: Sequence[Replica], now: float) -> None:
    """Once a phase: it has lasted longer than it was given."""
    late = {r.name for r in living if r.overdue}
    for replica in living:
        if replica.overdue and replica.name not in job.overdue:
            phase = Phase(replica.phase).name.lower()
            rank = f"rank {replica.slowest} " if len(replica.ranks) > 1 else "it "
            said = f"{rank}is in phase {phase} for {now - replica.phase_at:.0f} s: longer than its budget"
            job.emit("replica.overdue", replica.name, said)
    job.overdue = late


@dataclass
class Hang:
    """A replica that is hung now, or was evicted for it and is not back: what the agents are asked for."""

    incarnation: int
    rank: int  # that has produced least
    why: str
    since: float
    evidence: str = ""
    evicted: bool = False


def _evict_hung(job: Job, now: float) -> None:
    detection = job.config.detection
    if not detection.evict_hung:
        return
    for replica in job.states((State.HUNG,)):
        hang = job.hangs.get(replica.name)
        if hang is None or not (hang.evidence or now - hang.since >= detection.evidence_wait_s):
            continue
        hang.evicted = True  # kept, for the agent that has to end its process if it does not wake up
        why = f"hung: {hang.why}"
        hang.evicted = auto_evict(job, replica, why, now, Loss.HUNG, evidence=hang.evidence)


def on_evidence(job: Job, name: str, text: str, now: float) -> str | None:
    """An agent says what the threads of a hung replica do. None: taken; else why it is of no use."""
    hang, replica = job.hangs.get(name), job.table.get(name)
    if hang is None or replica is None or replica.incarnation != hang.incarnation:
        return f"{name} is not hung (any more)"
    first, hang.evidence = not hang.evidence, text
    if first:
        job.emit("replica.evidence", name, text.partition("\n")[0], evidence=text)
    if job.mode.value == "running":
        _evict_hung(job, now)
    return None
