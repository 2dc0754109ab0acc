"""Faults: what there is, what is injected, and the request for one (models.py has the routes)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agents.api.base import Answer, Request
from agents.api.blast import OVERRIDES, Override
from agents.api.safety import BlastSaid, FleetSaid, ProtectSaid
from agents.api.words import FaultState


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
    warning: str = ""  # where it may not hit all that one expects, and why
    params: dict[str, Any] = Field(default_factory=dict)
    request_id: str = ""  # of the InjectRequest: finds the fault when the answer to it was lost


class FaultParam(Answer):
    name: str
    type: str  # int | float | str | bool
    unit: str = ""
    required: bool = False
    default: Any = None
    help: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: list[str] = Field(default_factory=list)


class FaultSpec(Answer):
    """A catalogue entry, as agents/api/faultspecs.py describes it; and whether this machine can do it."""

    kind: str
    summary: str
    target: str
    params: list[FaultParam] = Field(default_factory=list)
    irreversible: bool = False
    supported: bool = True
    unsupported_reason: str = ""


class InjectRequest(Request):
    """POST /v1/faults. The same `request_id` twice gives the same fault, so that a retry is safe."""

    kind: str
    nic: str | None = None
    replica: str | None = None
    rank: int | None = Field(default=None, ge=0, le=1_000_000)  # of the replica; all that it has on the node without it
    duration_s: float = 60.0
    reason: str = ""
    params: dict[str, Any] = Field(default_factory=dict)
    request_id: str = ""
    dry_run: bool = False  # all checks, no fault; answers what would be done
    allow_last_rail: bool = False  # override the guard that keeps one healthy rail (`--allow-last-rail`)
    allow_last_replica: bool = False  # override the guard of min-replicas (`--allow-last-replica`)
    protect: ProtectSaid | None = None  # more than the agent's own settings protect: a playbook's
    blast: BlastSaid | None = None  # narrower limits than the agent's own: a playbook's
    fleet: FleetSaid | None = None  # what is known of other nodes, for the limits of the blast radius
    override: list[Override] | None = Field(
        default=None, max_length=len(OVERRIDES)
    )  # limits not to hold to; takes a reason
    dead_man_s: float | None = None  # revert when the controller is silent for so long (POST /v1/faults/{id}/keepalive)


class RevertAnswer(Answer):
    faults: list[FaultView]  # after the revert
