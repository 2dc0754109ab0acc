"""What the ranks of one replica say to each other: rank 0, the leader, to the others, over one connection each (TCP, or
a Unix socket where both are on one node).

The handshake proves the job token both ways, as on the control connection (messages.py):

    leader -> TeamChallenge (nonce)
    rank   -> RankHello (who it is, its nonce, proof)
    leader -> TeamWelcome (proof)                     or  TeamRefused (what does not fit)

After it orders go one way, in the order in which the leader carries them out itself, and reports the other way. Each
report names the epoch, step or round that it is about, so that what comes late is known to be late.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import (
    CheckpointNotice,
    Commit,
    Deal,
    EpochInfo,
    MemberInfo,
    Message,
    RailNotice,
    RankInfo,
    RelayedCommit,
)
from ftar_core.wire.part import Part

TEAM_VERSION = 1
PURPOSE_HELLO, PURPOSE_WELCOME, PURPOSE_REFUSED = "rank-hello", "rank-welcome", "rank-refused"

# --- handshake -----------------------------------------------------------------------------------------------------


class TeamChallenge(Message, frozen=True):
    job: str
    replica: str
    nonce: bytes
    version: int = TEAM_VERSION


class RankHello(Message, frozen=True):
    """`plan` and `state` are hashes of this rank's bucket plan and initial parameters."""

    job: str
    replica: str
    world_size: int
    info: RankInfo
    plan: str
    state: str
    last_step: int
    nonce: bytes
    proof: bytes
    version: int = TEAM_VERSION
    data_plane: str = "host"


class TeamWelcome(Message, frozen=True):
    """`host`: the leader's address for a rank that has not reached it at one (a Unix socket)."""

    proof: bytes
    host: str = ""


class TeamRefused(Message, frozen=True):
    reason: str
    hint: str
    proof: bytes


# --- agreement ------------------------------------------------------------------------------------------------------


class Front(str, Enum):
    """What has arrived at a rank that catches up, and is next to be applied."""

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"
    STEP = "step"


class Ballot(Part, frozen=True):
    """Where one rank of a replica that does not contribute yet stands; from all of them follows what they do next."""

    step: int  # the state it holds is that after this step; -1: none of this job
    front: Front = Front.NOTHING
    front_step: int = 0
    connected: bool = False  # a source's stream is running
    warm_ups: int = 0  # still to be made
    joins_at: int = 0  # told to contribute from this step on; 0: not yet
    restores: bool = False  # rank 0 was told to look for a checkpoint; then, `step` is one that this rank can load


# --- leader -> rank -------------------------------------------------------------------------------------------------


class Welcomed(Message, frozen=True):
    """A coordinator has accepted the replica: heartbeats go to this UDP port of the leader, at the address where the
    rank has reached it (else that of TeamWelcome), with this cookie and the rank's own number. Port 0: none wanted."""

    cookie: bytes
    port: int
    interval_ms: int
    incarnation: int


class PrepareOrder(Message, frozen=True):
    epoch: EpochInfo


class DiscardOrder(Message, frozen=True):
    epoch: EpochId


class EnterOrder(Message, frozen=True):
    epoch: EpochInfo
    step: int
    deal: Deal
    retry: bool
    last_commit_epoch: EpochId


class CommitOrder(Message, frozen=True):
    """`loss`: mean over all ranks and contributors."""

    commit: Commit
    loss: float | None = None


class RelayOrder(Message, frozen=True, tag="CommitOrder"):
    """The same, as a leader writes it that has not read all of the commit."""

    commit: RelayedCommit
    loss: float | None = None


class FollowOrder(Message, frozen=True):
    sources: tuple[MemberInfo, ...]
    fresh: bool = False
    mbit: float = 0.0  # of this rank


class WaitOrder(Message, frozen=True):
    reason: str


class EndOrder(Message, frozen=True):
    exit_code: int
    reason: str


class ExplainOrder(Message, frozen=True):
    """What are the digests of this rank's last report made of (messages.Explain)?"""

    step: int
    epoch: EpochId


class Call(Message, frozen=True):
    """Somebody has voted in this round and waits for the others."""

    round: int


class Agreed(Message, frozen=True):
    """All have voted; `ballots` by rank."""

    round: int
    ballots: tuple[Ballot, ...]


# --- rank -> leader -------------------------------------------------------------------------------------------------


class RankReduced(Message, frozen=True):
    """All buckets of this rank's ring are reduced. `weight`: of all contributors together, the same in all rings.
    `mean_loss`: over them, of this rank's share of the batches; `loss_weight`: of those that told a loss."""

    step: int
    epoch: EpochId
    digest: int
    finite: bool
    own_finite: bool
    weight: float
    loss: float | None
    step_ms: float
    produced_at: float
    wait_ms: float
    mean_loss: float | None = None
    loss_weight: float = 0.0
    state: int = 0
    norm: float = 0.0


class RankReady(Message, frozen=True):
    epoch: EpochId


class RankShadow(Message, frozen=True):
    step: int
    last_commit_epoch: EpochId
    ready: bool
    text: str
    notice: str = ""


class RankUnreachable(Message, frozen=True):
    peer: str
    epoch: EpochId
    reason: str


class RankExplains(Message, frozen=True):
    """Parts of the step's digests: (name, digest)."""

    step: int
    epoch: EpochId
    rank: int
    parts: tuple[tuple[str, int], ...]


class RankRestored(Message, frozen=True):
    """This rank holds the state of a checkpoint after `step`, or (0) its initial one; `deal`: from where to go on."""

    step: int
    state: str
    deal: Deal


class RankLeaves(Message, frozen=True):
    """This rank cannot go on, so the replica cannot."""

    reason: str
    exit_code: int


class Vote(Message, frozen=True):
    round: int
    ballot: Ballot


FromLeader = (
    TeamChallenge
    | TeamWelcome
    | TeamRefused
    | Welcomed
    | PrepareOrder
    | DiscardOrder
    | EnterOrder
    | CommitOrder
    | FollowOrder
    | WaitOrder
    | EndOrder
    | ExplainOrder
    | Call
    | Agreed
)
RankReport = RankReduced | RankReady | RankShadow | RankUnreachable | RankRestored | RankExplains | RankLeaves
Notice = RailNotice | CheckpointNotice  # passed on to the coordinator
ToLeader = RankHello | RankReport | Vote | Notice
from_leader: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
to_leader: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
