"""Messages between members (replica leaders), operators and the coordinator. Section numbers: ARCHITECTURE.md.

The handshake proves knowledge of the job token without sending it (HMAC-SHA256 challenge and response, both ways):

    coordinator -> Challenge(nonce, term, proof of both)
    peer        -> [Knock,] Hello | OpHello (client_nonce, proof of the challenge)   or  Outdated (this term is old)
    coordinator -> Welcome (proof of client_nonce)                          or  Refused (with a proof)

Every message is a msgspec struct with a tag; unknown tags, unknown fields and oversized frames are WireErrors.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import msgspec

from ftar_core.errors import WireError
from ftar_core.wire.accounting import AccountView
from ftar_core.wire.ids import NO_EPOCH, NO_TERM, EpochId, Term
from ftar_core.wire.part import Part
from ftar_core.wire.views import EVIDENCE_BYTES as EVIDENCE_BYTES  # noqa: PLC0414 (part of the messages)
from ftar_core.wire.views import CheckpointView as CheckpointView  # noqa: PLC0414
from ftar_core.wire.views import EventView as EventView  # noqa: PLC0414
from ftar_core.wire.views import HangView as HangView  # noqa: PLC0414
from ftar_core.wire.views import JobView as JobView  # noqa: PLC0414
from ftar_core.wire.views import ReplicaView as ReplicaView  # noqa: PLC0414
from ftar_core.wire.views import StallView as StallView  # noqa: PLC0414

T = TypeVar("T")
PROTOCOL_VERSION = 1
EXPLAINED_PARTS, PART_NAME = 1024, 200  # parts; characters


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of everything that travels on a control connection."""


# --- parts ---------------------------------------------------------------------------------------------------------


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


# --- handshake -----------------------------------------------------------------------------------------------------


class Challenge(Message, frozen=True):
    """`proof` binds the term to the job token (codec.vouch), because a member promises itself to the term before it
    hears more: a stranger on the port must not be able to make up a term that no coordinator ever reaches."""

    job: str
    nonce: bytes
    term: Term
    proof: bytes = b""
    version: int = PROTOCOL_VERSION


class Knock(Message, frozen=True):
    """Before a Hello longer than a stranger may send (64 KiB: hundreds of ranks, several rails): here is the proof."""

    job: str
    proof: bytes
    version: int = PROTOCOL_VERSION


class Hello(Message, frozen=True):
    """A replica's leader presents itself. `incarnation` 0 asks for a new one."""

    job: str
    replica: str
    incarnation: int
    ranks: tuple[RankInfo, ...]
    plan: str  # hash of the canonical bucket plan
    report: Report
    client_nonce: bytes
    proof: bytes
    version: int = PROTOCOL_VERSION
    last_step: int = 0  # the training script wants to end after this step; 0 = no wish
    software: dict[str, str] = {}  # package -> version, of what must be the same on all replicas


class OpHello(Message, frozen=True):
    """An operator's connection (an agent on behalf of `principal`)."""

    job: str
    principal: str
    client_nonce: bytes
    proof: bytes
    version: int = PROTOCOL_VERSION


class Outdated(Message, frozen=True):
    """The member has promised itself to a newer term: a coordinator that gets this exits (rule EXITREF)."""

    promised: Term
    proof: bytes


class Welcome(Message, frozen=True):
    term: Term
    incarnation: int
    proof: bytes
    cookie: bytes = b""  # 16 bytes; names this connection in heartbeats
    heartbeat_port: int = 0
    heartbeat_interval_ms: int = 100
    coordinator_wait_s: float = 600.0  # how long a member waits for a lost coordinator


class Refused(Message, frozen=True):
    reason: str
    retry: bool  # False: starting again will not help
    hint: str = ""
    proof: bytes = b""  # of client_nonce, filled in by the service: a stranger on the port cannot end a running member


# --- member -> coordinator -----------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """All buckets of `step` are reduced in `epoch` on all ranks of the replica."""

    step: int
    epoch: EpochId
    digest: int  # of the reduced gradients; equal on all members, as is `state`
    finite: bool
    own_finite: bool = True  # this replica's own gradients; looked at only where the reduced ones are not finite
    loss: float | None = None  # for the operator's eyes
    step_ms: float = 0.0
    produced_at: float = 0.0  # CLOCK_MONOTONIC seconds of its last gradient
    wait_ms: float = 0.0  # of step_ms: from its last gradient to the last reduced bucket
    slow_rank: int = 0  # the rank that computed longest
    state: int = 0  # of a slice of parameters and optimizer state before the step, which the step chooses; 0: not told
    norm: float = 0.0  # of this replica's own gradients; 0: not told


class Prepared(Message, frozen=True):
    """New links for the prepared epoch are up."""

    epoch: EpochId


class CaughtUp(Message, frozen=True):
    """A shadow holds the state after `step` and replays commits as they come: it can contribute from a boundary on."""

    step: int


class HoldsState(Message, frozen=True):
    """What the Hello said of this member's state is not true any more: a checkpoint was loaded, or there is none."""

    report: Report


class Progress(Message, frozen=True):
    """What a shadow or a waiting member is doing, for `ftctl status`."""

    state: str  # starting | fetching | replaying | spare
    step: int = 0
    text: str = ""
    notice: str = ""  # catching up begins again, and why: an event


class Unreachable(Message, frozen=True):
    """No rail to `peer` works, while the coordinator is reachable."""

    peer: str
    epoch: EpochId
    reason: str


class RailNotice(Message, frozen=True):
    """A rail of this rank changed state (for events and status)."""

    peer: str
    rail: str
    state: str
    reason: str
    rank: int = 0


class CheckpointNotice(Message, frozen=True):
    """A checkpoint of this replica's hand is on disk, or (`problem`) will not be. `seconds`: from the end of the step
    until then."""

    step: int
    path: str
    seconds: float = 0.0
    bytes: int = 0
    problem: str = ""


class Leaving(Message, frozen=True):
    """The member ends by itself and says why (an exception in the update, lost state)."""

    reason: str


class Outline(Message, frozen=True):
    """The answer to Describe. `plans`: hash of the bucket plan of each rank; `parameters`: of rank 0 (outline.py)."""

    plans: tuple[str, ...]
    parameters: bytes


class PartDigest(Part, frozen=True, array_like=True):
    """Of one bucket of reduced gradients, or one tensor of the state."""

    name: str
    digest: int


class Explained(Message, frozen=True):
    """The answer to Explain. For rank -1 `ranks`: (digest, state) of each rank, as in Done; else the parts of that rank
    (none where it does not know any more), at most EXPLAINED_PARTS."""

    step: int
    epoch: EpochId
    rank: int
    ranks: tuple[tuple[int, int], ...] = ()
    parts: tuple[PartDigest, ...] = ()


# --- coordinator -> member -----------------------------------------------------------------------------------------


class Catchup(Message, frozen=True):
    """To a shadow: fetch state and follow the commits from one of these contributors (sent anew when they change).
    `fresh`: the state it says it holds is not (known to be) one of this job's history, so it must not build on it."""

    term: Term
    sources: tuple[MemberInfo, ...]
    fresh: bool = False
    mbit: float = 0.0  # this shadow's share of what the job allows for catching up; 0: no limit


class Explain(Message, frozen=True):
    """Your `Done` of this step and others' do not agree: what is it made of? `rank` -1: each rank's; else the buckets
    and tensors of that rank."""

    term: Term
    step: int
    epoch: EpochId
    rank: int


class Describe(Message, frozen=True):
    """Send an Outline of your model: another replica's does not fit, and it is to be told where."""

    term: Term


class Prepare(Message, frozen=True):
    """Connect the links of this epoch in the background, keep running the current one."""

    term: Term
    epoch: EpochInfo


class PrepareCancel(Message, frozen=True):
    term: Term
    epoch: EpochId


class NewEpoch(Message, frozen=True):
    """Effective at once: abort what is in flight and reduce `step` again, every bucket, from retained gradients."""

    term: Term
    epoch: EpochInfo
    step: int
    deal: Deal
    lost: dict[str, str]  # replica -> why
    last_commit_epoch: EpochId


class Commit(Message, frozen=True):
    """Step `step`, reduced in `epoch`, is true for everybody. `next`, if given, is the membership from step+1 on."""

    term: Term
    step: int
    epoch: EpochId
    contributors: tuple[str, ...]
    verdict: Verdict
    deal: Deal  # of step + 1
    next: EpochInfo | None = None
    drained: tuple[str, ...] = ()  # members that leave with this commit
    last: bool = False
    checkpoint: bool = False  # one is due by time

    def whole(self) -> Commit:
        return self


class RelayedCommit(Message, frozen=True, tag="Commit"):
    """A Commit as the leader of several ranks reads it, who hands it on first of all: what grows with the number of
    replicas, and does not matter for that, is still as it came. `whole` reads it."""

    term: Term
    step: int
    epoch: EpochId
    contributors: msgspec.Raw
    verdict: Verdict
    deal: msgspec.Raw
    next: EpochInfo | None = None
    drained: tuple[str, ...] = ()
    last: bool = False
    checkpoint: bool = False

    def whole(self) -> Commit:
        """Raises WireError."""
        return Commit(
            term=self.term,
            step=self.step,
            epoch=self.epoch,
            contributors=_read(_names, self.contributors),
            verdict=self.verdict,
            deal=_read(_deal, self.deal),
            next=self.next,
            drained=self.drained,
            last=self.last,
            checkpoint=self.checkpoint,
        )


_names: msgspec.msgpack.Decoder[tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...])
_deal: msgspec.msgpack.Decoder[Deal] = msgspec.msgpack.Decoder(Deal)


def _read(decoder: msgspec.msgpack.Decoder[T], raw: msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a commit of this protocol: {error}") from None


class Join(Message, frozen=True):
    """To a shadow (or at the start of a job): contribute from `step` on, in this epoch."""

    term: Term
    epoch: EpochInfo
    step: int
    deal: Deal
    last_commit_epoch: EpochId


class Hold(Message, frozen=True):
    """The job cannot go on yet; `reason` says what it waits for. Ends with the next NewEpoch, Join or Commit.
    `restore`: nobody who is here holds the job's state; a member that has none may look for a checkpoint."""

    term: Term
    reason: str
    restore: bool = False


class Evicted(Message, frozen=True):
    """This incarnation is out; its messages are refused from now on. `in_place`: there is nothing against the process
    itself, it was only away; it may come back as a new incarnation without starting again, with the state it holds."""

    term: Term
    reason: str
    rejoin: bool  # start again?
    in_place: bool = False


# --- operators -----------------------------------------------------------------------------------------------------


class OpRequest(Message, frozen=True):
    """op: status | events | accounting (where the time went, as last saved) | drain | evict | rejoin | finish |
    force-quorum; for agents: hangs (who is hung), evidence (`reason` is what was found out about a hung replica),
    restarts (the replica is about to be started again, because of `incident`; none: it is not after all)"""

    id: int
    op: str
    replica: str = ""
    reason: str = ""
    rejoin: bool = True  # evict: may it come back by itself
    force: bool = False  # override the guard that keeps min-replicas
    after: int = 0  # events: after this sequence number
    dry_run: bool = False
    incident: str = ""  # what follows from this request belongs to this incident of an agent
    injected: bool = False  # behind which is an injected fault
    max_share: float = 0.0  # drain, evict: refused if more than this share of the replicas were out then; 0: no limit


class OpReply(Message, frozen=True):
    """code: ok | refused (by a guard) | unknown (no such replica) | conflict (not in a state for this) | failed"""

    id: int
    code: str
    text: str
    job: JobView | None = None
    events: tuple[EventView, ...] = ()
    hangs: tuple[HangView, ...] = ()
    accounting: AccountView | None = None
    checkpoint: CheckpointView | None = None  # with `accounting`


ToCoordinator = (
    Knock
    | Outline
    | Hello
    | OpHello
    | Outdated
    | Done
    | Prepared
    | CaughtUp
    | HoldsState
    | Progress
    | Unreachable
    | RailNotice
    | CheckpointNotice
    | Leaving
    | Explained
    | OpRequest
)
_OtherFromCoordinator = (
    Challenge
    | Describe
    | Explain
    | Welcome
    | Refused
    | Catchup
    | Prepare
    | PrepareCancel
    | NewEpoch
    | Join
    | Hold
    | Evicted
    | OpReply
)
FromCoordinator = _OtherFromCoordinator | Commit
ToLeaderOfSeveral = _OtherFromCoordinator | RelayedCommit
