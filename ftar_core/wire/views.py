"""What operators see of a job: the parts of an OpReply (messages.py)."""

from __future__ import annotations

from ftar_core.wire.accounting import AccountView
from ftar_core.wire.part import Part

EVIDENCE_BYTES = 8192


class ReplicaView(Part, frozen=True):
    """state: starting, suspect, hung, fetching, replaying, spare, contributing, draining, drained, evicted, blocked or
    unreachable (protocol.membership.State)."""

    name: str
    state: str
    reason: str
    since: float  # unix seconds
    incarnation: int
    slot: int
    step: int
    nodes: tuple[str, ...]
    heartbeat_age_ms: float | None = None
    phase: str = ""
    loss: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None  # a step, to the last gradient: the median of the last 20
    wait_ms: float | None = None  # a step, from there to the last reduced bucket: the same
    pace: float | None = None  # compute_ms by the median of the other contributors'
    straggler: bool = False
    diverged: str = ""  # what of its results differs from the others', said within the last rotation


class HangView(Part, frozen=True):
    """A replica that is hung, or was evicted for it and is not back. `wanted`: nobody has sent evidence yet."""

    replica: str
    incarnation: int
    rank: int  # that has produced least
    wanted: bool
    evicted: bool


class StallView(Part, frozen=True):
    """An incident as the coordinator saw it. stall_ms: commit - last survivor's gradient - median of 20 calm steps."""

    time: float
    kind: str  # replica-lost | replica-joined | replica-drained | step-late
    replica: str
    step: int
    detect_ms: float | None
    stall_ms: float | None
    reason: str


class CheckpointView(Part, frozen=True):
    """The newest checkpoint that is complete (`step` 0: none is known; `seconds`: from the end of its step until then)
    and the newest that could not be written. Times are Unix seconds, 0 where they are not known."""

    step: int = 0
    time: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    failed_step: int = 0
    failed_time: float = 0.0
    failed: str = ""
    failures: int = 0


class JobView(Part, frozen=True):
    """state: starting running holding recovering finished stopped"""

    name: str
    state: str
    reason: str
    step: int
    term: int
    epoch: int
    contributors: tuple[str, ...]
    replicas_wanted: int
    min_replicas: int
    replicas: tuple[ReplicaView, ...]
    stalls: tuple[StallView, ...]
    settings: dict[str, float]
    spares_wanted: int = 0
    step_ms_median: float | None = None
    checkpoint: CheckpointView = CheckpointView()
    pid: int = 0
    started: float = 0.0
    accounting: AccountView | None = None


class EventView(Part, frozen=True):
    """One thing that happened. `source` is the coordinator or a node; `seq` rises within a source's life."""

    seq: int
    time: float  # unix seconds
    source: str
    kind: str  # e.g. replica.lost, replica.joined, rail.down, fault.active
    object: str  # e.g. r1, node1/rail0
    reason: str
    injected: bool = False
    incident: str = ""
    action: str = ""  # that was asked for because of the incident: evict, drain, rejoin, restart
    evidence: str = ""  # what was found out about a hung replica: several lines, at most EVIDENCE_BYTES
