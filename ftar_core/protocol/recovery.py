"""What is true after a coordinator came back, or after all contributors vanished: a pure decision.

The idea: a commit can have reached some members before everything broke. Whoever decides anew must never choose
otherwise than the old coordinator may have. So only members of the last recorded epoch settle (nobody else can know its
last commit), the record says where that epoch began and on what, and members say how far they are.

Three cases, told apart by the `Basis`:

* the record is there (rules REC, START, WAITALL): wait for all recorded members, or a deadline, then settle with
  those that came. A member at the step before the epoch's first commits that one if its `Done` is of the epoch that
  committed it.
* the record is lost, or older than an epoch that somebody reports (rule STALE): all members of the highest reported
  epoch are needed, deadline or not, and a `Done` counts only if it is of the epoch that a reporter names for that
  commit (rule LASTEP). The operator's `force-quorum` does without the absent ones.
* the coordinator never died, but all contributors vanished (rule KNOW): it knows that the running step is committed
  nowhere, so anybody who was dealt a batch of it may reduce it again.

The model that found these rules, with a history for each that fails without it: ARCHITECTURE.md, "Recovery".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftar_core.protocol.record import Record
from ftar_core.wire.ids import NO_EPOCH, EpochId
from ftar_core.wire.messages import Deal, Done, EpochInfo, MemberInfo, Report


@dataclass(frozen=True)
class Standing:
    """A reporter: which life of the replica, its Report, and the Done (with the verdict) that it sent behind it."""

    incarnation: int
    report: Report
    done: Done | None = None

    @property
    def holds_result(self) -> bool:
        """It has the reduced result of its step, and we have its word on it."""
        d = self.done
        return d is not None and (d.step, d.epoch) == (self.report.step, self.report.epoch)


@dataclass(frozen=True)
class Basis:
    """What is known without asking members. `may_retry`: dealt at first_step, where that is known (rule KNOW)."""

    epoch: EpochInfo
    first_step: int
    deal: Deal
    last_commit_epoch: EpochId
    may_retry: tuple[MemberInfo, ...] = ()

    @classmethod
    def of(cls, record: Record) -> Basis:
        return cls(record.epoch, record.first_step, record.deal, record.last_commit_epoch)

    def lives(self) -> set[tuple[str, int]]:
        return {(m.replica, m.incarnation) for m in self.epoch.members + self.may_retry}


@dataclass(frozen=True)
class Settled:
    """`members` go on together. With `commit`, all of them hold the result of `step` of `epoch`: it commits. Otherwise
    `step` is reduced again in a new epoch, and those in `behind` commit step-1 first, each from its own result."""

    step: int
    commit: bool
    epoch: EpochId  # the epoch that was settled
    contributors: tuple[str, ...]  # of that epoch
    deal: Deal  # of `step`
    last_commit_epoch: EpochId  # of step - 1
    members: tuple[str, ...]
    behind: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Undecided:
    """`hopeless`: time alone will not help; an operator, or a member that comes back, would."""

    reason: str
    hopeless: bool = False


def decide(
    basis: Basis | None, standings: Mapping[str, Standing], *, waited: bool, force: bool = False
) -> Settled | Undecided:
    """Settle what is true, or say what is missing. `waited`: the deadline for recorded members has passed."""
    if not standings:
        whom = f"nobody of epoch {basis.epoch.id} ({_names(basis.epoch.names())})" if basis is not None else "no member"
        return Undecided(f"{whom} has connected yet", hopeless=waited)
    unsaid = [n for n, s in standings.items() if s.report.done and not s.holds_result]
    if unsaid:
        return Undecided(f"waiting for the result that {_names(unsaid)} announced")
    if basis is not None and max(s.report.epoch for s in standings.values()) > basis.epoch.id:
        basis = None
    if basis is None:
        return _without_record(standings, force)
    return _with_record(basis, standings, waited or force, force)


def _with_record(basis: Basis, standings: Mapping[str, Standing], waited: bool, force: bool) -> Settled | Undecided:
    lives = basis.lives()
    here = {n: s for n, s in standings.items() if (n, s.incarnation) in lives}
    missing = [m.replica for m in basis.epoch.members if m.replica not in here]
    if missing and not waited:
        return Undecided(f"waiting for {_names(missing)} of epoch {basis.epoch.id}")
    if not here and force:
        return _without_record(standings, force)
    if not here:
        return Undecided(
            f"nobody of epoch {basis.epoch.id} ({_names(basis.epoch.names())}) has come back", hopeless=True
        )
    start, previous = basis.first_step, basis.last_commit_epoch
    able = {n: s for n, s in here.items() if _can_start(s, start, previous)}
    if not able and force:
        return _without_record(standings, force)
    if not able:
        return Undecided(f"{_names(here)} came back, but nobody holds the state before step {start}", hopeless=True)
    step = max(start, *(s.report.step for s in able.values()))
    level = {n: s for n, s in able.items() if s.report.step == step}
    committer = previous if step == start else basis.epoch.id
    behind = {n: s for n, s in able.items() if s.report.step == step - 1 and _has_result_of(s, committer)}
    deal = basis.deal if step == start else _deal(level)
    if deal is None:
        return Undecided(f"nobody can say which batches belong to step {step}", hopeless=True)
    commit = bool(level) and not behind and all(_has_result_of(s, basis.epoch.id) for s in level.values())
    return Settled(
        step=step,
        commit=commit,
        epoch=basis.epoch.id,
        contributors=basis.epoch.names(),
        deal=deal,
        last_commit_epoch=committer,
        members=tuple(sorted(level | behind)),
        behind=tuple(sorted(behind)),
        reason=_reason(commit, step, level | behind, missing),
    )


def _without_record(standings: Mapping[str, Standing], force: bool) -> Settled | Undecided:
    top = max(standings.values(), key=lambda s: s.report.epoch).report
    if top.epoch == NO_EPOCH:
        return Undecided("the record is lost and no connected member holds state of the job", hopeless=True)
    lives = dict(zip(top.members, top.incarnations, strict=False))
    here = {n: s for n, s in standings.items() if lives.get(n) == s.incarnation}
    missing = [n for n in top.members if n not in here]
    if missing and not force:
        why = "the record is lost, so all members of the last epoch are needed"
        return Undecided(f"{why}: waiting for {_names(missing)} of epoch {top.epoch}", hopeless=True)
    step = max((s.report.step for s in here.values()), default=0)
    if step == 0:
        return Undecided(f"the record is lost and nobody of epoch {top.epoch} holds state", hopeless=True)
    level = {n: s for n, s in here.items() if s.report.step == step}
    previous = max(s.report.last_commit_epoch for s in level.values())
    behind = {n: s for n, s in here.items() if s.report.step == step - 1 and _has_result_of(s, previous)}
    all_able = len(level) + len(behind) == len(here)
    deal = _deal(level)
    if deal is None:
        return Undecided(f"nobody can say which batches belong to step {step}", hopeless=True)
    commit = not behind and all_able and all(_has_result_of(s, top.epoch) for s in level.values())
    return Settled(
        step=step,
        commit=commit,
        epoch=top.epoch,
        contributors=top.members,
        deal=deal,
        last_commit_epoch=previous,
        members=tuple(sorted(level | behind)),
        behind=tuple(sorted(behind)),
        reason=_reason(commit, step, level | behind, missing),
    )


def _can_start(standing: Standing, start: int, previous: EpochId) -> bool:
    """Holds the state before `start`, or the result that makes it."""
    report = standing.report
    return report.step >= start or (report.step == start - 1 and _has_result_of(standing, previous))


def _has_result_of(standing: Standing, epoch: EpochId) -> bool:
    return standing.holds_result and standing.report.epoch == epoch


def _deal(level: Mapping[str, Standing]) -> Deal | None:
    """What was dealt at their step, from anybody who was in an epoch (before that, a report only says from where to
    begin)."""
    known = (s.report for s in level.values() if s.report.epoch != NO_EPOCH)
    return next((report.deal for report in known if report.deal is not None), None)


def _reason(commit: bool, step: int, members: Mapping[str, Standing], missing: list[str]) -> str:
    what = f"step {step} was reduced everywhere and commits" if commit else f"step {step} is reduced again"
    without = f", without {_names(missing)}" if missing else ""
    return f"{_names(members)} settled it: {what}{without}"


def _names(names: Iterable[str]) -> str:
    """Sorted, and shortened where there are very many."""
    listed = sorted(names)
    head = ", ".join(listed[:8])
    return head if len(listed) <= 8 else f"{head} and {len(listed) - 8} more"
