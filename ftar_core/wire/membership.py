"""What many messages are made of: who is in the job, where its ranks are, who trains what, where a member stands."""

from __future__ import annotations

from enum import Enum

import msgspec

from ftar_core.wire.ids import NO_EPOCH, NO_TERM, EpochId, Term
from ftar_core.wire.part import Part


class Endpoint(Part, frozen=True, array_like=True):
    """A listening socket on one rail. The UDP socket for heartbeats of that rail has the same port number."""

    rail: str
    addr: str
    port: int


class RankInfo(Part, frozen=True, array_like=True):
    """Where one rank of a replica can be reached: its data links (one endpoint a rail) and its state server."""

    rank: int
    node: str
    links: tuple[Endpoint, ...]
    state: tuple[Endpoint, ...]


class MemberInfo(Part, frozen=True, array_like=True):
    """`ranks` by rank. In the epochs that a member is told, only its own and its neighbours' in the ring are there, and
    in those that a leader tells a rank only the one that this rank is connected to: a job of ten thousand ranks would
    otherwise send every address to everybody."""

    replica: str
    incarnation: int
    slot: int  # position in the ring; the order of reduction depends on slots only
    ranks: tuple[RankInfo, ...]

    def only(self, rank: int) -> MemberInfo:
        """Without the addresses of other ranks."""
        if not self.ranks:
            return self
        info = self.at(rank)
        return msgspec.structs.replace(self, ranks=(info,) if info is not None else ())

    def at(self, rank: int) -> RankInfo | None:
        """Where its rank of this number can be reached, if that is known here."""
        if rank < len(self.ranks) and self.ranks[rank].rank == rank:
            return self.ranks[rank]
        return next((info for info in self.ranks if info.rank == rank), None)


class EpochInfo(Part, frozen=True):
    """A membership. `members` are the contributors by ascending slot."""

    id: EpochId
    members: tuple[MemberInfo, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(m.replica for m in self.members)

    def ring_of(self, rank: int) -> EpochInfo:
        """As the rank of this number in each replica needs it: nothing of other ranks."""
        return msgspec.structs.replace(self, members=tuple(m.only(rank) for m in self.members))


class Deal(Part, frozen=True):
    """Which global batch each contributor trains at a step, and what is needed to deal the next (protocol/sampler.py).

    A contributor without an entry has weight 0 at this step. `returned` holds batches whose contributor was lost
    before the commit; they are dealt first, in order. `cursor` is the next batch never dealt. Batches from `limit` on
    do not exist: the job ends when all below are trained (0: there is no end). `round`: one update of the parameters is
    of so many batches, dealt over as many steps as that takes, and still lacks `left` of them, those of this deal
    included (0: every step is an update, and deals a batch to every contributor).
    """

    batches: dict[str, int]
    cursor: int
    returned: tuple[int, ...] = ()
    limit: int = 0
    round: int = 0
    left: int = 0


class Report(Part, frozen=True):
    """Where a member stands, told at every Hello (rule LASTEP needs last_commit_epoch)."""

    step: int  # the step it is working on: all before it are committed here; 0 = holds no state
    epoch: EpochId = NO_EPOCH
    members: tuple[str, ...] = ()  # replicas of that epoch, by slot
    incarnations: tuple[int, ...] = ()  # and their incarnations, in the same order
    done: bool = False  # holds the reduced result of `step` in `epoch`
    last_commit_epoch: EpochId = NO_EPOCH  # the epoch in which step-1 was committed
    promised: Term = NO_TERM  # the highest term it has accepted
    deal: Deal | None = None  # the dealt set of `step` (rule ASSIGN); before any epoch: from where to deal, no batches
    state_digest: str = ""  # of the parameters before `step`; compared where both sides are at the first step
    checkpoint_s: float = 0.0  # it wants a checkpoint this often; 0: not by time


class Verdict(str, Enum):
    APPLY = "apply"
    SKIP = "skip"  # gradients were not finite somewhere: nobody updates
    FAIL = "fail"  # the same, and the job was told to fail then: nobody updates, and this commit is the last
