"""A replica of several ranks as one member of the job: who of them has said what, and what the replica says therefore.

A replica has one voice. Its leader (rank 0) speaks with the coordinator; what it may say is the AND of what its ranks
have reported: a ring is ready when it is on every rank, a step is reduced when it is on every rank, a shadow is as far
as the rank that is furthest behind. What any one rank cannot do, the replica cannot: a peer that one rank does not
reach, a rank that leaves or is gone. The verdict on gradients is the AND of the ranks' `finite`.

Reports name the epoch, step or round they are about; what is late is dropped here, so that no rank has to be waited
for before an order. The machine is pure: no clock, no socket; `heard` and `voted` return what is to be done.

Ranks that do not contribute yet must act alike although news reaches them at different times (an update may hold
collectives between the ranks, such as clipping by the global norm, and so does every forward of a sharded model).
They vote: each says where it stands, and when all have, all are told all ballots and draw the same conclusion
(training/lockstep.py).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftar_core.protocol.events import (
    Explanation,
    LeaveNow,
    MemberEvent,
    PeerUnreachable,
    Restored,
    RingReady,
    ShadowAt,
    StepReduced,
)
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import EpochId
from ftar_core.wire.team import (
    Agreed,
    Ballot,
    Call,
    RankExplains,
    RankLeaves,
    RankReady,
    RankReduced,
    RankReport,
    RankRestored,
    RankShadow,
    RankUnreachable,
)


@dataclass(frozen=True)
class RankFacts:
    """What a rank says of itself once, when it comes."""

    plan: str
    state: str
    last_step: int
    data_plane: str = "host"


def misfit(mine: RankFacts, theirs: RankFacts, rank: int) -> str:
    """Why this rank's script cannot be that of the leader; empty if it can."""
    if mine.last_step != theirs.last_step:
        return f"rank {rank} wants to end after step {theirs.last_step}, rank 0 after step {mine.last_step}"
    if mine.data_plane != theirs.data_plane:
        return f"rank {rank} has data_plane={theirs.data_plane}, rank 0 has {mine.data_plane}"
    return ""


def joint_hash(parts: Sequence[str]) -> str:
    """Of the ranks' hashes (SHA-256, hex), by rank. A replica of one rank is named by that rank's own."""
    if len(parts) == 1:
        return parts[0]
    return hashlib.sha256("\0".join((str(len(parts)), *parts)).encode()).hexdigest()


class Team:
    """One life of a replica with `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._epoch: EpochId | None = None
        self._step = 0
        self._reduced: dict[int, StepReduced | RankReduced] = {}
        self._prepared: EpochId | None = None
        self._ready: set[int] = set()
        self._shadows: dict[int, ShadowAt] = {}
        self._restored: dict[int, Restored] = {}
        self._told_anew: set[int] = set()  # ranks that have reported since the replica last did
        self._told: tuple[int, bool] | None = None
        self._round = 1
        self._ballots: dict[int, Ballot] = {}
        self._leaving = False
        self.mean_loss: float | None = None  # of the last step that all ranks have reduced, over ranks and contributors

    @property
    def unreported(self) -> int:
        """So many ranks have yet to reduce the running step."""
        return self.size - len(self._reduced)

    # --- orders that went to all ranks

    def prepared(self, epoch: EpochId) -> None:
        self._prepared = epoch
        self._ready.clear()

    def discarded(self, epoch: EpochId) -> None:
        if self._prepared == epoch:
            self._prepared = None
            self._ready.clear()

    def entered(self, epoch: EpochId, step: int) -> None:
        """Whatever was reduced before is void."""
        self._epoch, self._step = epoch, step
        self._reduced.clear()
        self._prepared = None
        self._ready.clear()

    def committed(self, step: int) -> None:
        self._step = step + 1
        self._reduced.clear()

    # --- what the ranks report

    def heard(self, rank: int, event: MemberEvent) -> list[MemberEvent]:
        """What the replica's member machine is to be told."""
        if self._leaving:
            return []
        match event:
            case StepReduced():
                return self.reduced(rank, event)
            case RingReady(epoch):
                if epoch == self._prepared:
                    self._ready.add(rank)
                    if len(self._ready) == self.size:
                        return [event]
                return []
            case ShadowAt():
                return self._heard_shadow(rank, event)
            case Explanation():
                return [event] if event.rank == rank else []
            case Restored():
                self._restored[rank] = event
                if len(self._restored) < self.size:
                    return []
                all_of_them = [self._restored.pop(number) for number in range(self.size)]
                return [replace(all_of_them[0], digest=joint_hash([one.digest for one in all_of_them]))]
            case PeerUnreachable(reason=reason):
                return [event if rank == 0 else replace(event, reason=f"rank {rank}: {reason}")]
            case LeaveNow(reason=reason):
                self._leaving = True
                return [event if rank == 0 else replace(event, reason=f"rank {rank}: {reason}")]
        return [event] if rank == 0 else []

    def lost(self, rank: int, why: str) -> list[MemberEvent]:
        """A rank is gone: the replica ends whole, and comes back whole."""
        if self._leaving:
            return []
        self._leaving = True
        return [LeaveNow(f"rank {rank} is gone ({why})", int(RankExit.RESTART))]

    def reduced(self, rank: int, event: StepReduced | RankReduced) -> list[MemberEvent]:
        """A rank has reduced a step. As it came from the rank: there may be hundreds at every step."""
        if self._leaving or event.epoch != self._epoch or event.step != self._step:
            return []
        self._reduced[rank] = event
        first, other = next(iter(self._reduced.items()))
        if event.weight != other.weight:
            self._leaving = True
            text = (
                f"step {event.step}: the weights of all replicas add up to {other.weight:g} on rank {first}, but to "
                f"{event.weight:g} on rank {rank}: session.weight must be the same on all ranks of a replica"
            )
            return [LeaveNow(text, int(RankExit.USAGE))]
        if len(self._reduced) < self.size:
            return []
        ranks = [self._reduced[rank] for rank in range(self.size)]
        self.mean_loss = _mean_loss(ranks)
        return [_together(ranks)]

    def digests(self, step: int, epoch: EpochId) -> tuple[tuple[int, int], ...]:
        """(digest, state) of all ranks; empty where they are not known any more."""
        if (step, epoch) != (self._step, self._epoch) or len(self._reduced) < self.size:
            return ()
        return tuple((self._reduced[rank].digest, self._reduced[rank].state) for rank in range(self.size))

    def _heard_shadow(self, rank: int, event: ShadowAt) -> list[MemberEvent]:
        self._shadows[rank] = event
        self._told_anew.add(rank)
        if event.notice:
            self._told = (event.step, False)
            return [event]
        if len(self._shadows) < self.size:
            return []
        last = min(self._shadows.values(), key=lambda s: s.step)
        ready = all(s.ready for s in self._shadows.values())
        if ready and any(s.step != last.step for s in self._shadows.values()):
            # One rank hears of a commit a moment before another, at every step: a spare is not unready for that.
            if self._told is not None and self._told[1]:
                return []
            ready = False
        if (last.step, ready) == self._told and len(self._told_anew) < self.size:
            return []
        self._told = (last.step, ready)
        self._told_anew.clear()
        return [replace(last, ready=ready)]

    # --- agreement

    def voted(self, rank: int, number: int, ballot: Ballot) -> Call | Agreed | None:
        """What all ranks are to be told now."""
        if number != self._round or rank in self._ballots:
            return None  # of a round that is over
        self._ballots[rank] = ballot
        if len(self._ballots) == self.size:
            agreed = Agreed(round=number, ballots=tuple(self._ballots[rank] for rank in range(self.size)))
            self._round += 1
            self._ballots.clear()
            return agreed
        return Call(round=number) if len(self._ballots) == 1 else None


def _mean_loss(ranks: Sequence[StepReduced | RankReduced]) -> float | None:
    """Weighted mean over all ranks' shares of all contributors' batches; None if nobody told a loss."""
    told = [(one.mean_loss, one.loss_weight) for one in ranks if one.mean_loss is not None and one.loss_weight > 0]
    weight = sum(weight for _, weight in told)
    return sum(loss * weight for loss, weight in told) / weight if told else None


def _joint(digests: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(digests)}Q", *digests)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _together(ranks: Sequence[StepReduced | RankReduced]) -> StepReduced:
    """One replica's result from those of its ranks."""
    first = ranks[0]
    if len(ranks) == 1 and isinstance(first, StepReduced):
        return first
    slow = max(range(len(ranks)), key=lambda rank: ranks[rank].step_ms - ranks[rank].wait_ms)
    losses = [one.loss for one in ranks if one.loss is not None]
    return StepReduced(
        step=first.step,
        epoch=first.epoch,
        digest=_joint([one.digest for one in ranks]),
        state=_joint([one.state for one in ranks]) if any(one.state for one in ranks) else 0,
        norm=math.hypot(*(one.norm for one in ranks)),
        finite=all(one.finite for one in ranks),
        own_finite=all(one.own_finite for one in ranks),
        loss=sum(losses) / len(losses) if losses else None,
        step_ms=ranks[slow].step_ms,
        wait_ms=ranks[slow].wait_ms,
        slow_rank=slow,
        produced_at=max(one.produced_at for one in ranks),
        weight=first.weight,
    )


# --- events as messages ---------------------------------------------------------------------------------------------


def report_of(event: MemberEvent) -> RankReport | None:
    """What a rank tells its leader; None for what only the leader's own machine knows."""
    match event:
        case StepReduced():
            return RankReduced(
                step=event.step,
                epoch=event.epoch,
                digest=event.digest,
                finite=event.finite,
                own_finite=event.own_finite,
                weight=event.weight,
                loss=event.loss,
                step_ms=event.step_ms,
                produced_at=event.produced_at,
                wait_ms=event.wait_ms,
                mean_loss=event.mean_loss,
                loss_weight=event.loss_weight,
                state=event.state,
                norm=event.norm,
            )
        case RingReady(epoch):
            return RankReady(epoch=epoch)
        case ShadowAt(step, last_commit_epoch, ready, text, notice):
            return RankShadow(step=step, last_commit_epoch=last_commit_epoch, ready=ready, text=text, notice=notice)
        case Restored(step, digest, deal):
            return RankRestored(step=step, state=digest, deal=deal)
        case PeerUnreachable(peer, epoch, reason):
            return RankUnreachable(peer=peer, epoch=epoch, reason=reason)
        case Explanation(step, epoch, rank, _, parts):
            return RankExplains(step=step, epoch=epoch, rank=rank, parts=parts)
        case LeaveNow(reason, exit_code):
            return RankLeaves(reason=reason, exit_code=int(exit_code))
    return None


def event_of(report: RankReport) -> MemberEvent:
    """The inverse of `report_of`."""
    match report:
        case RankReduced():
            return StepReduced(
                step=report.step,
                epoch=report.epoch,
                digest=report.digest,
                finite=report.finite,
                own_finite=report.own_finite,
                loss=report.loss,
                step_ms=report.step_ms,
                produced_at=report.produced_at,
                weight=report.weight,
                wait_ms=report.wait_ms,
                mean_loss=report.mean_loss,
                loss_weight=report.loss_weight,
                state=report.state,
                norm=report.norm,
            )
        case RankReady():
            return RingReady(report.epoch)
        case RankShadow():
            return ShadowAt(report.step, report.last_commit_epoch, report.ready, report.text, report.notice)
        case RankRestored():
            return Restored(report.step, report.state, report.deal)
        case RankUnreachable():
            return PeerUnreachable(report.peer, report.epoch, report.reason)
        case RankExplains():
            return Explanation(report.step, report.epoch, report.rank, (), report.parts)
        case RankLeaves():
            return LeaveNow(report.reason, report.exit_code)
