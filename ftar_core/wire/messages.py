"""Messages between members (replica leaders), operators and the coordinator. Section numbers: ARCHITECTURE.md.

How a connection begins is in handshake.py, what messages are made of in membership.py and views.py; all of it is handed
on here, for those who speak with the coordinator. Every message is a msgspec struct with a tag; unknown tags, unknown
fields and oversized frames are WireErrors.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ftar_core.errors import WireError
from ftar_core.wire.accounting import AccountView
from ftar_core.wire.handshake import PROTOCOL_VERSION, Challenge, Hello, Knock, OpHello, Outdated, Refused, Welcome
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.membership import Deal, Endpoint, EpochInfo, MemberInfo, RankInfo, Report, Verdict
from ftar_core.wire.part import Message, Part
from ftar_core.wire.views import EVIDENCE_BYTES, CheckpointView, EventView, HangView, JobView, ReplicaView, StallView

T = TypeVar("T")
EXPLAINED_PARTS, PART_NAME = 1024, 200  # parts; characters


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
