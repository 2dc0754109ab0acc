"""What can happen to the coordinator and to a member: the inputs of the two pure machines."""

from __future__ import annotations

from dataclasses import dataclass

from ftar_core.wire.heartbeat import TeamBeat
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import Deal, Hello, Message, OpRequest

# --- coordinator ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberHello:
    """An authenticated Hello arrived on connection `conn` (numbers of the service, never used twice)."""

    conn: int
    hello: Hello


@dataclass(frozen=True)
class MemberMessage:
    conn: int
    message: Message


@dataclass(frozen=True)
class ConnectionClosed:
    conn: int
    why: str


@dataclass(frozen=True)
class BeatSeen:
    """A leader's heartbeat with the cookie of `conn`: its own progress, and what it knows of its other ranks."""

    conn: int
    phase: int
    step: int
    produced: int
    reduced: int
    team: TeamBeat | None = None
    overdue: bool = False


@dataclass(frozen=True)
class OutdatedSeen:
    """A member, authenticated, refuses this coordinator's term."""

    promised: Term


@dataclass(frozen=True)
class Operator:
    """A request of an authenticated operator; answered by one `Reply` effect with the same conn and id."""

    conn: int
    principal: str
    request: OpRequest


@dataclass(frozen=True)
class Tick:
    """Time has passed (the deadline that the machine asked for, or earlier)."""


@dataclass(frozen=True)
class RecordFailed:
    """The store could not write the record: the effects behind the Persist were dropped, nothing of it was sent."""

    reason: str


CoordinatorEvent = (
    MemberHello | MemberMessage | ConnectionClosed | BeatSeen | OutdatedSeen | Operator | Tick | RecordFailed
)

# --- member --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Challenged:
    """Connected to a coordinator of this term: the machine answers with SendHello or SendOutdated."""

    term: Term


@dataclass(frozen=True)
class Disconnected:
    why: str


@dataclass(frozen=True)
class Received:
    message: Message


@dataclass(frozen=True)
class StepReduced:
    """The session: every bucket of `step` is reduced in `epoch`, on every rank of the replica.

    `finite` is a property of the **reduced** gradients (equal on all members, like `digest`), so that any one survivor
    knows the verdict after a coordinator restart. `own_finite` is of this replica's own, to say whose they were."""

    step: int
    epoch: EpochId
    digest: int
    finite: bool
    loss: float | None = None
    step_ms: float = 0.0
    produced_at: float = 0.0
    own_finite: bool = True
    weight: float = 0.0  # of all contributors together: the same in the rings of all ranks (runtime/team.py)
    wait_ms: float = 0.0  # of step_ms, behind the last gradient
    slow_rank: int = 0
    mean_loss: float | None = None  # over the contributors, of this rank's share
    loss_weight: float = 0.0  # and the weight of those that told a loss
    state: int = 0  # digest of the slice of parameters and optimizer state that the step chooses, before it; 0: none
    norm: float = 0.0  # of this replica's own gradient, before the reduction; 0: not told


@dataclass(frozen=True)
class RingReady:
    """The native core: the links of a prepared epoch are up."""

    epoch: EpochId


@dataclass(frozen=True)
class ShadowAt:
    """The session of a shadow: state loaded and replayed up to and including `step`; `ready` = warmed up, following.

    Told at every step it follows. After Join(step=n) it is told once more with step n-1, as soon as that state is
    really there: until then the member reports that it holds no state."""

    step: int
    last_commit_epoch: EpochId
    ready: bool
    text: str = ""
    notice: str = ""  # why it all begins again: worth an event


@dataclass(frozen=True)
class Restored:
    """The session: the state after `step` of a checkpoint is there, or (0) the initial one, because there is none.
    `deal`: from where batches are to be dealt; `digest` as `initial_digest` of the member."""

    step: int
    digest: str
    deal: Deal


@dataclass(frozen=True)
class PeerUnreachable:
    peer: str
    epoch: EpochId
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The session: what was asked for by `TellParts`. `rank` -1: `ranks` holds (digest, state) of each; else its parts
    (name, digest)."""

    step: int
    epoch: EpochId
    rank: int
    ranks: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class LeaveNow:
    """The session cannot go on (exception in the update, lost state, told to join while nobody is left to get the state
    from): tell the coordinator and end."""

    reason: str
    exit_code: int


MemberEvent = (
    Challenged
    | Disconnected
    | Received
    | StepReduced
    | RingReady
    | ShadowAt
    | Restored
    | PeerUnreachable
    | Explanation
    | LeaveNow
    | Tick
)
