"""What agents answer and accept. Version 1; unknown keys in requests are errors, unknown keys in answers are ignored.

Durations are seconds (`_s`), rates Mbit/s (`_mbit`), times Unix seconds. Roles: viewer < operator < chaos.
Every error, whatever the status, is an ErrorBody. `Authorization: Bearer TOKEN` everywhere but /healthz.

| route | role | asks | answers |
|---|---|---|---|
| GET /healthz | none | | Alive |
| GET /v1/node | viewer | | NodeView |
| GET /v1/events?after=SEQ&limit=N&wait_s=S | viewer | long poll, at most 30 s | EventsAnswer |
| GET /v1/links?pid=P&rail=R&state=S&each=BOOL&limit=N | viewer | | LinksAnswer |
| GET /v1/fault-kinds | viewer | | list[FaultSpec] |
| GET /v1/faults | viewer | | list[FaultView] (open ones, and those reverted in the last hour) |
| POST /v1/faults | chaos | InjectRequest | FaultView |
| GET /v1/faults/{id} | viewer | | FaultView |
| POST /v1/faults/{id}/revert | operator | | RevertAnswer |
| POST /v1/faults/revert-all | operator | | RevertAnswer (only those that this call reverted, or could not) |
| POST /v1/faults/{id}/keepalive | chaos | | FaultView |
| GET /v1/job | viewer | | JobState |
| GET /v1/job/events?after=SEQ | viewer | | EventsAnswer |
| POST /v1/job/replicas/{r}/drain, evict, rejoin | operator | ReplicaAction | ActionAnswer |
| POST /v1/job/force-quorum, finish | operator | CoordinatorAction | ActionAnswer |
| POST /v1/replicas/{r}/start, stop, restart | operator | SupervisionAction | ActionAnswer |
| POST /v1/replicas/{r}/stacks | operator | StacksRequest (evidence.py) | StacksAnswer |
| GET /metrics | viewer | | Prometheus text |
| GET /openapi.json | viewer | | OpenAPI 3.1 |
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agents.api.words import FaultState as FaultState  # noqa: PLC0414 (part of the contract)
from agents.api.words import Health as Health  # noqa: PLC0414 (part of the contract)
from agents.api.words import Role as Role  # noqa: PLC0414 (part of the contract)

API_VERSION = 1
DEFAULT_PORT = 7610


class Answer(BaseModel):
    """An answer of the agent; a newer agent may say more."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Request(BaseModel):
    """A request to the agent; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ErrorBody(Answer):
    """Every error of the agent. `code` is stable (ERROR_CODES); the three texts are shown to the user as they are."""

    code: str
    thing: str  # what it is about: "node1/rail7", "fault f-12ab"
    reason: str
    hint: str = ""  # the next command
    details: dict[str, Any] = Field(default_factory=dict)


# code -> (HTTP status, ftctl exit code)
ERROR_CODES: dict[str, tuple[int, int]] = {
    "bad-request": (422, 2),
    "unauthorized": (401, 2),
    "forbidden": (403, 7),
    "unknown-nic": (404, 2),
    "unknown-fault": (404, 2),
    "unknown-replica": (404, 2),
    "unknown-kind": (404, 2),
    "not-found": (404, 2),
    "bad-duration": (422, 2),
    "refused": (409, 7),  # by a guard: not a rail, already faulted, last healthy replica
    "conflict": (409, 1),  # not in a state for this
    "faults-disabled": (403, 7),
    "unsupported": (501, 1),  # this kernel or machine cannot
    "ledger": (507, 1),  # the undo could not be written: nothing was injected
    "coordinator": (502, 1),  # not reachable, or it failed
    "no-coordinator": (404, 1),  # none is configured: a job that needs none, or an agent of another one
    "failed": (500, 1),
    "in-force": (500, 5),  # a fault may still be in force
}


class Alive(Answer):
    """GET /healthz"""

    ok: bool
    node: str
    version: str


class AgentInfo(Answer):
    pid: int
    age_s: float
    version: str
    rss_mb: float
    cpu_percent: float
    allow_faults: bool
    watchdog_pid: int | None = None


class NicView(Answer):
    """One network interface. `role`: rail, mgmt or other. `state` healthy|degraded|unhealthy with its reason."""

    name: str
    role: str
    present: bool
    up: bool  # administratively
    carrier: bool
    speed_mbit: int | None = None
    addresses: list[str] = Field(default_factory=list)  # with prefix length
    mac: str = ""
    mtu: int = 0
    rx_bytes: int = 0
    tx_bytes: int = 0
    rx_errors: int = 0
    tx_errors: int = 0
    rx_dropped: int = 0
    tx_dropped: int = 0
    carrier_changes: int = 0
    state: Health = Health.UNKNOWN
    reason: str = ""
    injected: bool = False  # its state is a fault's doing


class GpuView(Answer):
    index: int
    uuid: str
    name: str
    temperature_c: float | None = None
    utilization_percent: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    power_w: float | None = None
    state: Health = Health.UNKNOWN
    reason: str = ""


class GpuSummary(Answer):
    """`note` says why there are none, or why the reading is old ("no GPUs (NVML not found)")."""

    devices: list[GpuView] = Field(default_factory=list)
    note: str = ""
    state: Health = Health.UNKNOWN


class ProcessView(Answer):
    """A replica's process as supervised here. state: running | exited | backoff | stopped | starting | failed"""

    replica: str
    rank: int
    pid: int | None
    state: str
    exit_code: int | None = None
    restarts: int = 0
    next_start_s: float | None = None
    cpu_percent: float | None = None
    rss_mb: float | None = None
    status: str = ""  # psutil's word: running, sleeping, stopped, zombie
    log: str = ""
    reason: str = ""


class LinkView(Answer):
    peer: str
    rail: str
    direction: str
    state: str
    active: bool
    reason: str
    since_s: float
    flaps: int
    resumes: int
    bytes: int


class RankView(Answer):
    """A rank that registered with this agent."""

    job: str
    replica: str
    rank: int
    pid: int
    node: str
    state: str
    step: int
    term: int
    epoch: int
    contributors: list[str] = Field(default_factory=list)
    links: list[LinkView] = Field(default_factory=list)
    last_stall_ms: float = 0.0
    tokens_per_s: float = 0.0
    loss: float | None = None
    compute_ms: float | None = None  # a step of this rank: the median of the last 20
    wait_ms: float | None = None
    silent_s: float = 0.0  # since the last report


class LinkRailView(Answer):
    """One rail of a process, over all its connections.

    `state` is the worst one of them (UP, HOLD, PROBING, DOWN), with the reason of that connection and its age. `moved`:
    connections that prefer this rail and send over another one now, by that one's name. `flaps` is the most of one
    connection, not yet forgotten; `detect_ms` how long the last loss took to notice, the longest of them.
    """

    rail: str
    device: str
    address: str
    links: int
    up: int = 0
    states: dict[str, int] = Field(default_factory=dict)
    state: str = ""
    reason: str = ""
    since_s: float = 0.0
    active: int = 0  # connections whose data it carries
    moved: dict[str, int] = Field(default_factory=dict)
    flaps: int = 0
    bytes: int = 0
    hold_left_s: float = 0.0
    detect_ms: float | None = None
    retransmits: int = 0


class LinkProcessView(Answer):
    """A process with links, found by its status socket. kind: ring (a training rank's) | nccl (the NCCL plugin's).

    `rank` is its RANK as text, `name` what its peers call it. `silent_s`: since its last answer; `note` says why.
    """

    pid: int
    uid: int
    kind: str
    job: str
    name: str
    rank: str
    mode: str
    age_s: float
    silent_s: float = 0.0
    note: str = ""
    links: int = 0
    left_out: int = 0  # links that found no room in its answer
    peers: int = 0
    resumes: int = 0
    rails: list[LinkRailView] = Field(default_factory=list)


class LinkRow(Answer):
    """Connections of one process to one peer over one rail, in one direction; with `each`, one connection (`link`)."""

    pid: int
    kind: str
    rank: str
    name: str
    peer: str
    direction: str  # out | in
    rail: str
    device: str
    address: str  # the peer's
    link: int | None = None
    links: int
    up: int
    state: str  # the worst
    reason: str
    since_s: float
    active: int
    flaps: int
    resumes: int
    bytes: int
    hold_left_s: float = 0.0
    detect_ms: float | None = None
    retransmits: int = 0


class LinksAnswer(Answer):
    """GET /v1/links. `left_out`: rows beyond the limit."""

    links: list[LinkRow]
    left_out: int = 0


class FaultView(Answer):
    id: str
    kind: str
    node: str
    target: str  # e.g. "node1/rail0"
    state: FaultState
    owner: str  # principal
    reason: str
    created: float
    duration_s: float
    ttl_left_s: float
    detail: str = ""  # why it is in this state
    undo: list[str] = Field(default_factory=list)  # commands that undo it by hand
    irreversible: bool = False
    params: dict[str, Any] = Field(default_factory=dict)
    request_id: str = ""  # of the InjectRequest: finds the fault when the answer to it was lost


class FaultParam(Answer):
    name: str
    type: str  # int | float | str | bool
    unit: str = ""
    required: bool = False
    default: Any = None
    help: str = ""


class FaultSpec(Answer):
    """A catalogue entry. `target`: nic | replica | node | none"""

    kind: str
    summary: str
    target: str
    params: list[FaultParam] = Field(default_factory=list)
    irreversible: bool = False
    supported: bool = True
    unsupported_reason: str = ""


class NodeView(Answer):
    """GET /v1/node"""

    schema_: int = Field(default=1, alias="schema")
    name: str
    time: float
    agent: AgentInfo
    nics: list[NicView]
    gpus: GpuSummary
    ranks: list[RankView]
    processes: list[ProcessView]
    link_processes: list[LinkProcessView] = Field(default_factory=list)
    faults: list[FaultView]  # not reverted ones, and those reverted in the last minute
    problems: list[ProblemView]


class ProblemView(Answer):
    """`action` is the command or step recommended, `reason` the sentence why."""

    object: str
    reason: str
    action: str = ""


class InjectRequest(Request):
    """POST /v1/faults. The same `request_id` twice gives the same fault, so that a retry is safe."""

    kind: str
    nic: str | None = None
    replica: str | None = None
    duration_s: float = 60.0
    reason: str = ""
    params: dict[str, Any] = Field(default_factory=dict)
    request_id: str = ""
    dry_run: bool = False  # all checks, no fault; answers what would be done
    allow_last_rail: bool = False  # override the guard that keeps one healthy rail (`--allow-last-rail`)
    dead_man_s: float | None = None  # revert when the controller is silent for so long (POST /v1/faults/{id}/keepalive)


class RevertAnswer(Answer):
    faults: list[FaultView]  # after the revert


class ReplicaAction(Request):
    """POST /v1/job/replicas/{replica}/{drain|evict|rejoin}"""

    reason: str
    force: bool = False
    rejoin: bool = True  # evict: may it come back by itself
    dry_run: bool = False


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
    seq: int
    time: float
    source: str
    kind: str
    object: str
    reason: str
    injected: bool = False
    incident: str = ""
    evidence: str = ""  # what was found out about a hung replica: several lines


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


class StallState(Answer):
    time: float
    kind: str
    replica: str
    step: int
    detect_ms: float | None
    stall_ms: float | None
    reason: str


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
    pid: int = 0
    started: float = 0.0


NodeView.model_rebuild()
