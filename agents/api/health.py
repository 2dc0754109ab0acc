"""Verdicts on what a node consists of, and the incidents they belong to (models.py has the routes).

A *verdict* is what one monitor says of one object: how well it is, why, from which lines or readings, and what it
suggests. An *incident* is everything that is wrong with one object from the first bad verdict to the last: a GPU that
writes 800,000 equal lines into the kernel log and then falls off the bus is one incident. What is decided and done
about it carries the incident's id in its events (`ftctl events --incident ID`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from agents.api.base import Answer, Request
from agents.api.words import Action, Health

MAX_VERDICTS = 256  # of one POST, and of one foreign monitor
MAX_EVIDENCE = 8  # lines
MAX_LINE = 500  # characters
DEFAULT_TTL_S = 600.0

Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/+-]*$", max_length=64)]
Line = Annotated[str, StringConstraints(max_length=MAX_LINE)]


class Verdict(Answer):
    """What one monitor says of one object.

    `kind` gpu, nic, replica, node or another word; `object` such as "gpu 3", "nic rail0", "memory", unique on the node;
    `uuid` where the thing has one. `code` is the stable name of what is wrong: "xid.79", "nic.carrier", "gpu.lost";
    empty when nothing is. `reason` is a sentence, `evidence` the lines or readings it comes from, `hint` what a person
    would do. `action` is a suggestion; what is done is the policy's decision. `incident` is empty for what is well.
    `since` (Unix seconds) is when this began, `count` how often it was said in all, `times` how often within 24 h it
    came back after a pause or from another process. `fault`: the id of the injected fault behind it, if one is known.
    """

    node: str
    kind: str
    object: str
    health: Health
    reason: str
    code: str = ""
    uuid: str = ""
    evidence: list[str] = Field(default_factory=list)
    action: Action = Action.NONE
    hint: str = ""
    incident: str = ""
    since: float = 0.0
    last: float = 0.0
    count: int = 1
    times: int = 1
    injected: bool = False
    fault: str = ""
    simulated: bool = False
    source: str = "ft-agent"  # or the name of the foreign monitor


class Incident(Answer):
    """What is or was wrong with one object. `health`, `reason` and `action` are of its worst verdict so far; `codes`
    all that was seen in it; `closed` is 0 while it is open."""

    id: str
    node: str
    kind: str
    object: str
    health: Health
    reason: str
    uuid: str = ""
    action: Action = Action.NONE
    codes: list[str] = Field(default_factory=list)
    sources: list[str] = Field(default_factory=list)
    opened: float
    last: float
    closed: float = 0.0
    why_closed: str = ""
    count: int = 1
    injected: bool = False
    simulated: bool = False


class MonitorView(Answer):
    """What looks: the kernel log, GPUs, NICs, RDMA ports, others' files. `ok` false: `note` says what is not seen."""

    name: str
    ok: bool
    note: str = ""


class HealthAnswer(Answer):
    """GET /v1/health. `health` is the worst of the verdicts; `incidents` the open ones, then those closed lately."""

    schema_: int = Field(default=1, alias="schema")
    node: str
    time: float
    health: Health
    verdicts: list[Verdict]
    incidents: list[Incident]
    monitors: list[MonitorView]


class ForeignVerdict(Request):
    """What another monitor found. Healthy takes back what that monitor said of the object (of that `code`, if one is
    given). A verdict that is not said again within `ttl_s` is forgotten, since its monitor may have died; 0: it holds
    until it is taken back or cleared."""

    kind: Word
    object: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[\x21-\x7e][\x20-\x7e]*$")]
    health: Health
    reason: Line = ""
    code: Word | None = None
    uuid: Annotated[str, StringConstraints(max_length=96)] = ""
    evidence: list[Line] = Field(default_factory=list, max_length=MAX_EVIDENCE)
    action: Action | None = None  # none given: watch for degraded, check for unhealthy
    injected: bool = False
    ttl_s: float = Field(default=DEFAULT_TTL_S, ge=0, le=7 * 86_400)


class VerdictsRequest(Request):
    """POST /v1/verdicts: verdicts of one foreign monitor (gpud, NVSentinel, DCGM, node-problem-detector, your own).
    `complete`: these are all it has; what it said before and does not say now is taken back."""

    source: Word
    verdicts: list[ForeignVerdict] = Field(max_length=MAX_VERDICTS)
    complete: bool = False


class VerdictsAnswer(Answer):
    """`incidents`: ids of the incidents that the verdicts belong to, in their order; empty for what is well."""

    incidents: list[str]


class ClearRequest(Request):
    """POST /v1/clear: an operator has seen to it. Sticky verdicts and the history behind them are forgotten; what is
    still wrong is found again at the next look."""

    kind: Word
    object: Annotated[str, StringConstraints(min_length=1, max_length=64)]  # "rail0", "gpu 3" or "3"
    reason: Annotated[str, StringConstraints(min_length=1, max_length=MAX_LINE)]


class ClearAnswer(Answer):
    """`cleared`: how many verdicts. `text` is the sentence for the user."""

    cleared: int
    text: str
