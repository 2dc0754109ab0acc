"""The job as its coordinator sees it, its events, and what operators ask of it (models.py has the routes)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from agents.api.base import Answer, Request


class ReplicaAction(Request):
    """POST /v1/job/replicas/{replica}/{drain|evict|rejoin}. `incident`: it belongs to this one (health.py).
    `max_share`: refused if more than this share of the replicas were out then; 0: no limit."""

    reason: str
    incident: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]*$", max_length=64)] = ""
    force: bool = False
    rejoin: bool = True  # evict: may it come back by itself
    dry_run: bool = False
    max_share: float = Field(default=0.0, ge=0, le=1)


class CoordinatorAction(Request):
    """POST /v1/job/force-quorum, /v1/job/finish"""

    reason: str
    dry_run: bool = False


class SupervisionAction(Request):
    """POST /v1/replicas/{replica}/{start|stop|restart|rejoin}"""

    reason: str


class ActionAnswer(Answer):
    code: str
    text: str


class EventRecord(Answer):
    """`incident` ties together what was seen, decided and done about one thing. `verdict` (a word of Health) and
    `action` are of events that are one. `node` is empty in events of the coordinator."""

    seq: int
    time: float
    source: str
    kind: str
    object: str
    reason: str
    injected: bool = False
    incident: str = ""
    evidence: str = ""  # what was found out about a hung replica, or kernel lines: several lines
    node: str = ""
    verdict: str = ""
    action: str = ""


class EventsAnswer(Answer):
    """GET /v1/events?after=SEQ&limit=N&wait_s=S (long poll) and GET /v1/job/events?after=SEQ"""

    events: list[EventRecord]
    last: int
    boot: str  # changes when numbering starts again


class ReplicaState(Answer):
    name: str
    state: str
    reason: str
    since: float
    incarnation: int
    slot: int
    step: int
    nodes: list[str]
    heartbeat_age_ms: float | None = None
    phase: str = ""
    loss: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None  # a step, to the last gradient: the median of the last 20
    wait_ms: float | None = None  # a step, from there to the last reduced bucket: the same
    pace: float | None = None  # compute_ms by the median of the other contributors'
    straggler: bool = False
    diverged: str = ""  # what of its results differs from the others', said within the last rotation


class StallState(Answer):
    time: float
    kind: str
    replica: str
    step: int
    detect_ms: float | None
    stall_ms: float | None
    reason: str


class TimeSpent(Answer):
    """What part of the job's time was spent on: words of ftar_core.wire.accounting (Category, Loss)."""

    category: str  # productive | starting | stalled | degraded | recomputed | slow
    cause: str | None = None  # of a loss, where one is known
    us: int
    count: int = 0  # of productive and degraded the steps; else how often it happened


class JobAccount(Answer):
    """Where the job's time went. `total_us` is the sum of `spent`; `late`: of the running step, not in the sum yet."""

    since: float
    total_us: int
    spent: list[TimeSpent]
    effective: float | None = None  # productive time by all time
    calm_us: int | None = None
    late: TimeSpent | None = None


class CheckpointState(Answer):
    """The newest checkpoint that is complete, and the newest that could not be written. `step`, `failed_step` 0: none
    is known. Times are Unix seconds, 0 where not known; `seconds`: from the end of its step until it was complete."""

    step: int = 0
    time: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    failed_step: int = 0
    failed_time: float = 0.0
    failed: str = ""
    failures: int = 0


class JobState(Answer):
    """GET /v1/job: the coordinator's view (field for field ftar_core.wire.messages.JobView)."""

    name: str
    state: str
    reason: str
    step: int
    term: int
    epoch: int
    contributors: list[str]
    replicas_wanted: int
    min_replicas: int
    replicas: list[ReplicaState]
    stalls: list[StallState]
    settings: dict[str, float]
    spares_wanted: int = 0
    step_ms_median: float | None = None
    checkpoint: CheckpointState = Field(default_factory=CheckpointState)
    pid: int = 0
    started: float = 0.0
    accounting: JobAccount | None = None
