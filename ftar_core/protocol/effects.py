"""What the two pure machines ask their shells to do, in order."""

from __future__ import annotations

from dataclasses import dataclass

from ftar_core.protocol.record import Record
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import (
    Commit,
    Deal,
    EpochInfo,
    EventView,
    MemberInfo,
    Message,
    OpReply,
    RelayedCommit,
    Report,
)

# --- coordinator ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Persist:
    """Write and fsync the record **before** any later effect of the same list. If the write fails, drop those effects
    and feed RecordFailed; if the store is fenced (a newer term), exit."""

    record: Record


@dataclass(frozen=True)
class Send:
    """A `Welcome` leaves the machine with the incarnation and the settings; the shell adds what it alone knows:
    `proof`, `cookie` and `heartbeat_port`. A list never holds more than one Persist."""

    conn: int
    message: Message


@dataclass(frozen=True)
class Reply:
    conn: int
    reply: OpReply


@dataclass(frozen=True)
class Close:
    """Send what is queued, then close the connection."""

    conn: int
    why: str


@dataclass(frozen=True)
class Emit:
    """An event for operators and logs. The shell numbers and dates it (seq, time are 0 here)."""

    event: EventView


@dataclass(frozen=True)
class Stop:
    """The coordinator process ends: exit_code 0 after the last commit, 75 when fenced or outdated (start it again),
    1 when the job cannot go on. With `promised`, the store must first raise its claim to at least `promised.number`, so
    that the next life gets a term that the members accept (rule EXITREF)."""

    exit_code: int
    reason: str
    promised: Term | None = None


CoordinatorEffect = Persist | Send | Reply | Close | Emit | Stop

# --- member --------------------------------------------------------------------------------------------------------


# A member's shell begins by connecting, as if Reconnect(0) had been returned. Effects of one list are carried out in
# order; those behind an ApplyCommit wait until the update has run.


@dataclass(frozen=True)
class SendHello:
    """Answer the challenge with a Hello carrying this report and the current incarnation."""

    incarnation: int
    report: Report


@dataclass(frozen=True)
class RestoreState:
    """Nobody holds the job's state: look for a checkpoint, then feed Restored."""


@dataclass(frozen=True)
class SendOutdated:
    promised: Term


@dataclass(frozen=True)
class Tell:
    """Send this message to the coordinator (dropped if the connection is gone; the next Hello tells the state anew)."""

    message: Message


@dataclass(frozen=True)
class Reconnect:
    """Drop the connection, if any, and connect again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True)
class PrepareRing:
    """Begin connecting the links of this epoch; feed RingReady when they are up."""

    epoch: EpochInfo


@dataclass(frozen=True)
class DiscardRing:
    epoch: EpochId


@dataclass(frozen=True)
class EnterEpoch:
    """Abort everything of older epochs; from now on reduce `step` in this epoch. With `retry`, buckets of the step that
    were produced are submitted again from retained gradients, and later ones as they come.
    `deal` is the dealt set of `step`: unchanged by retries."""

    epoch: EpochInfo
    step: int
    deal: Deal
    retry: bool
    last_commit_epoch: EpochId


@dataclass(frozen=True)
class ApplyCommit:
    """Step `commit.step` is true: apply the update (or skip it, by the verdict), go on with step+1. `loss`: its mean
    over all ranks of all contributors, where a replica has several (runtime/team.py)."""

    commit: Commit | RelayedCommit
    loss: float | None = None


@dataclass(frozen=True)
class FollowSources:
    """Be a shadow: fetch state and follow commits from one of these. `fresh`: forget the state that is here. `mbit`: at
    most so fast (0: no limit)."""

    sources: tuple[MemberInfo, ...]
    fresh: bool = False
    mbit: float = 0.0


@dataclass(frozen=True)
class StandDown:
    """This life is out, but the process goes on: abort everything of its epoch. What it computed for the running step
    is void. `keep`: the state after the last commit is complete and may be built on. What the process is to be it is
    told when it has a new incarnation."""

    reason: str
    keep: bool


@dataclass(frozen=True)
class TellParts:
    """The coordinator asks what the digests of this step are made of (messages.Explain): feed an `Explanation`."""

    step: int
    epoch: EpochId
    rank: int


@dataclass(frozen=True)
class Wait:
    """The job holds, or there is no coordinator: nothing to do but to wait; `reason` for status."""

    reason: str


@dataclass(frozen=True)
class End:
    """The member ends with this exit code (ftar_core.wire.exits)."""

    exit_code: int
    reason: str


MemberEffect = (
    SendHello
    | SendOutdated
    | Tell
    | Reconnect
    | RestoreState
    | PrepareRing
    | DiscardRing
    | EnterEpoch
    | ApplyCommit
    | FollowSources
    | StandDown
    | TellParts
    | Wait
    | End
)
