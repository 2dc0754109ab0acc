"""What agents answer and accept. Version 1; unknown keys in requests are errors, unknown keys in answers are ignored.

Durations are seconds (`_s`), rates Mbit/s (`_mbit`), times Unix seconds. Roles: viewer < operator < chaos.
Every error, whatever the status, is an ErrorBody. `Authorization: Bearer TOKEN` everywhere but /healthz.

| route | role | asks | answers |
|---|---|---|---|
| GET /healthz | none | | Alive |
| GET /v1/node | viewer | | NodeView |
| POST /v1/node/cordon, uncordon | operator | CordonRequest (cordon.py) | CordonAnswer |
| GET /v1/events?after=SEQ&limit=N&wait_s=S | viewer | long poll, at most 30 s | EventsAnswer |
| GET /v1/health | viewer | | HealthAnswer (health.py) |
| POST /v1/verdicts | operator | VerdictsRequest (health.py): what other monitors found | VerdictsAnswer |
| POST /v1/clear | operator | ClearRequest (health.py) | ClearAnswer |
| GET /v1/links?pid=P&rail=R&state=S&each=BOOL&limit=N | viewer | | LinksAnswer |
| GET /v1/fault-kinds | viewer | | list[FaultSpec] |
| GET /v1/faults | viewer | | list[FaultView] (open ones, and those reverted in the last hour) |
| GET /v1/audit?since=UNIX&limit=N | viewer | | AuditAnswer (audit.py) |
| POST /v1/faults/halt, allow | operator | HaltRequest (halt.py) | HaltAnswer |
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

from agents.api.base import (
    API_VERSION,
    DEFAULT_PORT,
    ERROR_CODES,
    Answer,
    ErrorBody,
    Request,
)
from agents.api.faults import (
    FaultParam,
    FaultSpec,
    FaultView,
    InjectRequest,
    RevertAnswer,
)
from agents.api.health import (
    ClearAnswer,
    ClearRequest,
    ForeignVerdict,
    HealthAnswer,
    Incident,
    MonitorView,
    Verdict,
    VerdictsAnswer,
    VerdictsRequest,
)
from agents.api.job import (
    ActionAnswer,
    CoordinatorAction,
    EventRecord,
    EventsAnswer,
    JobAccount,
    JobState,
    ReplicaAction,
    ReplicaState,
    StallState,
    SupervisionAction,
    TimeSpent,
)
from agents.api.node import (
    AgentInfo,
    Alive,
    GpuSummary,
    GpuView,
    LinkProcessView,
    LinkRailView,
    LinkRow,
    LinksAnswer,
    LinkView,
    NicView,
    NodeView,
    ProblemView,
    ProcessView,
    RankView,
)
from agents.api.words import (
    Action,
    FaultState,
    Health,
    Role,
)

__all__ = [
    "API_VERSION",
    "DEFAULT_PORT",
    "ERROR_CODES",
    "Action",
    "ActionAnswer",
    "AgentInfo",
    "Alive",
    "Answer",
    "ClearAnswer",
    "ClearRequest",
    "CoordinatorAction",
    "ErrorBody",
    "EventRecord",
    "EventsAnswer",
    "FaultParam",
    "FaultSpec",
    "FaultState",
    "FaultView",
    "ForeignVerdict",
    "GpuSummary",
    "GpuView",
    "Health",
    "HealthAnswer",
    "Incident",
    "InjectRequest",
    "JobAccount",
    "JobState",
    "LinkProcessView",
    "LinkRailView",
    "LinkRow",
    "LinkView",
    "LinksAnswer",
    "MonitorView",
    "NicView",
    "NodeView",
    "ProblemView",
    "ProcessView",
    "RankView",
    "ReplicaAction",
    "ReplicaState",
    "Request",
    "RevertAnswer",
    "Role",
    "StallState",
    "SupervisionAction",
    "TimeSpent",
    "Verdict",
    "VerdictsAnswer",
    "VerdictsRequest",
]
