"""Results that should be equal and are not: who is the odd one, what of its results it is, and what follows.

Every `Done` carries two digests: of the reduced gradients, and of the slice of parameters and optimizer state that the
step chooses, as they were before it. All members hold the same bytes, or something was corrupted: in transit, in a
copy, in the state. So a difference is a vote. With three or more voters the majority is right and the odd one is named;
two can only disagree ("unattributed").

Before anything is decided, those who differ are asked what their digests are made of: first by rank (rank i of all
replicas holds the same shard, so each ring is a vote of its own), then, of the rank that differs, by bucket and tensor.
The job stands still meanwhile, so no answer is waited for longer than `explain_s`; without one the decision is the same
and says less.

What follows is the operator's choice. Named and `evict_diverged`: it is put out before the step is committed, restarts,
and fetches the others' state; the step is reduced again without it. Named, but not opted in (or a guard forbids it):
the others are not stopped by it; the step is committed, and an alarm says whose state is not the job's from here on,
once a rotation. Unattributed: the job holds and asks for a decision, unless it was told to go on with an alarm.

What is not seen: corruption of a replica's gradients before the reduction, which is in everybody's sum (outliers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftar_core.protocol.evictions import auto_evict
from ftar_core.protocol.job import Job
from ftar_core.protocol.majority import outvoted
from ftar_core.protocol.membership import Replica, natural
from ftar_core.wire.accounting import Loss
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Done, Explain, Explained, PartDigest

ROTATION = 64  # where replicas do not say
MOST_ASKED = 16
NAMED = 4  # parts, replicas
REDUCED, STATE = "reduced gradients", "parameters or optimizer state"
Digests = tuple[int, int]  # of the reduced gradients, of the slice of the state (0: not told)


@dataclass(frozen=True)
class Judgement:
    """`odd`: who differs from the majority, and in what. Where `clear` is false there is none, and `odd` are all."""

    odd: Mapping[str, tuple[str, ...]]
    clear: bool


def judge(votes: Mapping[str, Digests]) -> Judgement:
    """Who is right about each of the two numbers."""
    odd: dict[str, tuple[str, ...]] = {}
    clear = True
    for at, kind in ((0, REDUCED), (1, STATE)):
        said = {name: digests[at] for name, digests in votes.items() if at == 0 or digests[at]}
        differ, sure = outvoted(said)
        clear = clear and sure
        for name in differ:
            odd[name] = (*odd.get(name, ()), kind)
    return Judgement(odd, clear)


@dataclass
class Dispute:
    """About the results of one step in one epoch. `asked`: the rank that a member was asked about and has not answered
    for (-1: all of them)."""

    step: int
    epoch: EpochId
    due: float
    judgement: Judgement
    asked: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, tuple[Digests, ...]] = field(default_factory=dict)
    parts: dict[str, tuple[int, tuple[PartDigest, ...]]] = field(default_factory=dict)  # name -> rank, its parts
    commits: bool = False  # decided: the step is committed all the same


@dataclass(frozen=True)
class Alarm:
    """Said about a replica that was not put out."""

    incarnation: int
    step: int
    text: str


def agreed(job: Job, now: float) -> bool:
    """All members are done: may their step be committed? Asks, evicts, or holds the job otherwise."""
    if not differ(job.done):
        return True
    dispute = job.dispute
    if dispute is None or (dispute.step, dispute.epoch) != (job.step, job.epoch.id):
        dispute = job.dispute = _open(job, now)
    if dispute.commits:
        return True
    if dispute.asked and now < dispute.due:
        job.timers["dispute"] = dispute.due
        return False
    job.timers.pop("dispute", None)
    return _decide(job, dispute, now)


def _open(job: Job, now: float) -> Dispute:
    judgement = judge({name: (d.digest, d.state) for name, d in job.done.items()})
    dispute = Dispute(job.step, job.epoch.id, now + job.config.detection.explain_s, judgement)
    _ask(job, dispute, _parties(job, judgement), -1 if job.ranks > 1 else 0)
    return dispute


def _parties(job: Job, judgement: Judgement) -> list[str]:
    """Who differ, and one to compare with."""
    right = [name for name in job.done if name not in judgement.odd]
    return [*sorted(judgement.odd, key=natural), *right[:1]][:MOST_ASKED]


def _ask(job: Job, dispute: Dispute, names: Iterable[str], rank: int) -> None:
    for name in names:
        replica = job.table.get(name)
        if replica is not None and job.is_member(replica):
            dispute.asked[name] = rank
            job.send(replica, Explain(term=job.term, step=dispute.step, epoch=dispute.epoch, rank=rank))


def on_explained(job: Job, replica: Replica, answer: Explained) -> None:
    """An answer: of use if it was asked for."""
    dispute, name = job.dispute, replica.name
    if dispute is None or (answer.step, answer.epoch) != (dispute.step, dispute.epoch):
        return
    if dispute.asked.get(name) != answer.rank or not job.is_member(replica):
        return
    del dispute.asked[name]
    if answer.rank >= 0:
        dispute.parts[name] = (answer.rank, answer.parts)
        return
    dispute.ranks[name] = answer.ranks
    if not any(rank < 0 for rank in dispute.asked.values()):
        _by_ring(job, dispute)


def _by_ring(job: Job, dispute: Dispute) -> None:
    """All tables are here. Where all members were asked, each ring votes; then the parts of the first that differs."""
    tables = {name: ranks for name, ranks in dispute.ranks.items() if len(ranks) == job.ranks}
    differing = [rank for rank in range(job.ranks) if len({ranks[rank] for ranks in tables.values()}) > 1]
    if len(tables) == len(job.done) and differing:
        judged = [judge({name: ranks[rank] for name, ranks in tables.items()}) for rank in differing]
        odd: dict[str, tuple[str, ...]] = {}
        for one in judged:
            for name, kinds in one.odd.items():
                odd[name] = tuple(dict.fromkeys((*odd.get(name, ()), *kinds)))
        dispute.judgement = Judgement(odd, all(one.clear for one in judged))
    if differing:
        _ask(job, dispute, (n for n in _parties(job, dispute.judgement) if n in tables), differing[0])


def _decide(job: Job, dispute: Dispute, now: float) -> bool:
    """True: commit. False: it is not committed like this."""
    judgement = dispute.judgement
    if not judgement.clear:
        return _unattributed(job, dispute)
    put_out = False
    for name in sorted(judgement.odd, key=natural):
        replica = job.table.get(name)
        if replica is None or not job.is_member(replica):
            continue
        why = _why(job, dispute, name)
        left = len(job.members) - len(job.gone) - 1
        if job.config.detection.evict_diverged and left >= job.config.min_replicas:
            said = f"{why}; it is put out and fetches its state from the others"
            short = f"its {' and '.join(judgement.odd[name])} differ from those of the others at step {dispute.step}"
            if auto_evict(job, replica, short, now, Loss.DIVERGED, in_place=False):
                job.emit("replica.diverged", name, said)
                job.alarms.pop(name, None)
                put_out = True
                continue
        said = f"{why}; from here on its state is not the others': `ftctl evict replica {name}` makes it fetch theirs"
        _alarm(job, name, replica.incarnation, said)
    if put_out:
        job.done = {}  # the step is reduced again without them
        return False
    dispute.commits = True
    return True


def _unattributed(job: Job, dispute: Dispute) -> bool:
    names = sorted(dispute.judgement.odd, key=natural)
    who = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    what = _what(dispute, names)
    why = f"results of step {dispute.step} differ between {who} ({what}): unattributed, nobody can say whose is wrong"
    if job.config.continue_unattributed:
        said = f"{why}; the job goes on with states that are not equal (--on-unattributed continue)"
        _alarm(job, "", 0, said)
        dispute.commits = True
        return True
    job.diverged = (
        f"{why}. `ftctl evict replica R` the one you do not trust, or start the coordinator with "
        "--on-unattributed continue"
    )
    job.emit("job.diverged", job.config.job, job.diverged)
    return False


def rotation(job: Job) -> int:
    """In so many steps the whole state was compared."""
    told = job.software.get("FTAR_ROTATION", "")
    return int(told) if told.isascii() and told.isdigit() and int(told) > 0 else ROTATION


def _alarm(job: Job, name: str, incarnation: int, text: str) -> None:
    """About a replica, or about the job (""), once a rotation."""
    before = job.alarms.get(name)
    if before is None or before.incarnation != incarnation or job.step - before.step >= rotation(job):
        job.alarms[name] = Alarm(incarnation, job.step, text)
        job.emit("replica.diverged" if name else "job.diverged", name or job.config.job, text)


def alarm_of(job: Job, replica: Replica) -> str:
    """What was said about this life within the last rotation, and a step."""
    alarm = job.alarms.get(replica.name)
    fresh = alarm is not None and alarm.incarnation == replica.incarnation and job.step - alarm.step <= rotation(job)
    return alarm.text if alarm is not None and fresh else ""


def trusted(job: Job) -> Mapping[str, Done]:
    """The reports of those whose results are right, as far as that is known."""
    dispute = job.dispute
    if dispute is None or not dispute.commits or not dispute.judgement.clear:
        return job.done
    return {name: done for name, done in job.done.items() if name not in dispute.judgement.odd}


def differ(done: Mapping[str, Done]) -> bool:
    """Results that should be equal are not."""
    return len({d.digest for d in done.values()}) > 1 or len({d.state for d in done.values() if d.state}) > 1


def settled(job: Job, step: int, done: Mapping[str, Done]) -> None:
    """They differ, but somebody who is absent may hold the step committed: it is committed, and said."""
    if differ(done):
        judgement = judge({name: (d.digest, d.state) for name, d in done.items()})
        names = ", ".join(sorted(judgement.odd, key=natural)[:NAMED])
        said = f"results of step {step} differ ({names}), and it may be committed already: the states are not equal"
        for name in judgement.odd if judgement.clear else ("",):
            replica = job.table.get(name)
            _alarm(job, name, replica.incarnation if replica is not None else 0, said)


# --- words -----------------------------------------------------------------------------------------------------------


def _why(job: Job, dispute: Dispute, name: str) -> str:
    others = len(job.done) - len(dispute.judgement.odd)
    mine = job.done[name]
    theirs = next((d for n, d in job.done.items() if n not in dispute.judgement.odd), mine)
    numbers = [
        f"{ours:016x}, theirs {right:016x}"
        for ours, right in ((mine.digest, theirs.digest), (mine.state, theirs.state))
        if ours != right
    ]
    reference = next((n for n in dispute.parts if n not in dispute.judgement.odd), "")
    what = _what(dispute, [name, reference])
    return f"at step {dispute.step} its {what} differ from those of the {others} others (digest {'; '.join(numbers)})"


def _what(dispute: Dispute, names: list[str]) -> str:
    """Buckets and tensors that differ between these, or at least the kinds."""
    told = {name: dispute.parts[name] for name in names if name in dispute.parts}
    kinds = " and ".join(dict.fromkeys(kind for name in names for kind in dispute.judgement.odd.get(name, ())))
    if len(told) < 2:
        return kinds
    values: dict[str, set[int]] = {}
    for _, parts in told.values():
        for part in parts:
            values.setdefault(part.name, set()).add(part.digest)
    found = [name for name, digests in values.items() if len(digests) > 1]
    if not found:
        return kinds
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    where = f"rank {rank}: " if (rank := next(iter(told.values()))[0]) or len(dispute.ranks) else ""
    return f"{where}{', '.join(found[:NAMED])}{more}"
