"""What a playbook may say, version 1. Unknown keys are errors. `ftctl chaos schema` prints this as JSON Schema.

Durations are texts such as 500ms, 30s, 2m. `$name` anywhere in a text is a variable (vars).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from agents.api.blast import OVERRIDES, Override
from agents.api.safety import BlastNarrowed, ProtectRules
from ftctl.playbook import expressions, facts, mixes, moments
from ftctl.playbook.objectives import MIN_FOR_P95, BreakerLimits, Limits, Objectives
from ftctl.playbook.strict import Duration, Strict

MAX_ACTIONS = 500  # in a list
MAX_REPEAT = 10_000
Scalar = bool | int | float | str


def _condition(value: Any) -> expressions.Expression:
    expression = expressions.parse(value)
    for comparison in expression.comparisons:
        if wrong := facts.problem(comparison.fact):
            raise ValueError(wrong)
    return expression


_CONDITION_SCHEMA = {"type": "string", "examples": ["replicas.contributing == 3", "replica.r1.state == contributing"]}
Condition = Annotated[expressions.Expression, BeforeValidator(_condition), WithJsonSchema(_CONDITION_SCHEMA)]
_MOMENT_SCHEMA = {"type": "string", "examples": ["2026-12-01T14:30:00Z", "+90s"]}
Moment = Annotated[moments.Moment, BeforeValidator(moments.parse), WithJsonSchema(_MOMENT_SCHEMA)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Words = Annotated[str, Field(min_length=1, max_length=200)]


class Lab(Strict):
    """The cluster that `run --lab` brings: the options of `ftctl lab up`."""

    replicas: int = Field(default=3, ge=1, le=64)
    rails: int = Field(default=2, ge=1, le=8)
    ranks: int = Field(default=1, ge=1, le=16)
    nodes_per_replica: int = Field(default=1, ge=1, le=16)
    spares: int = Field(default=0, ge=0, le=16)
    min_replicas: int = Field(default=1, ge=1, le=64)
    step_ms: int = Field(default=200, ge=0, le=60_000)
    seed: int = Field(default=0, ge=0)
    rate: str = ""
    evict_hung: bool = False
    evict_diverged: bool = False
    gpus: int = Field(default=0, ge=0, le=64)
    policy: Literal["", "observe", "recommend", "act"] = ""
    job: Literal["training", "nccl"] = "training"


class Target(Strict):
    """What an action is aimed at. `replica: any` is a contributing replica, chosen by the seed of the run; `node: any`
    a node that answers; without a node, a replica's own is meant. `rail: active` is the rail that carries its data."""

    node: Words | None = None
    nic: Words | None = None
    rail: int | Literal["active", "any"] | None = None
    replica: Words | None = None
    rank: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_link(self) -> Target:
        if self.nic is not None and self.rail is not None:
            raise ValueError("nic and rail both say which link: give one")
        if (self.nic or self.rail is not None) and not (self.node or self.replica):
            raise ValueError("whose link? give node or replica as well")
        if self.rank is not None and self.replica is None:
            raise ValueError("rank is that of a replica: give replica as well")
        return self


class At(Strict):
    """When: at a step of the job (`step: 50`, or `step: +5` from now), when a condition holds, after a time, or at one:
    `time: 2026-12-01T14:30:00Z`, or `time: +90s` from the beginning of the method."""

    step: int | Annotated[str, Field(pattern=r"^\+\d{1,9}$")] | None = None
    when: Condition | None = None
    after: Duration | None = None
    time: Moment | None = None
    within: Duration = 120.0  # of waiting for the step or the condition

    @model_validator(mode="after")
    def _one(self) -> At:
        if sum(value is not None for value in (self.step, self.when, self.after, self.time)) != 1:
            raise ValueError("exactly one of step, when, after and time says when")
        if isinstance(self.step, int) and self.step < 0:
            raise ValueError("a step is 0 or more (write +5 for five steps from now, in quotes)")
        return self


class Timed(Strict):
    at: At | None = None


class Fault(Strict):
    """A fault and what it is aimed at. `with`: its parameters, as `ftctl inject KIND --help` lists them. `override`:
    limits that it is not held to."""

    inject: Name
    target: Target = Target()
    params: dict[str, Scalar] = Field(default_factory=dict, alias="with", max_length=32)
    duration: Duration = 60.0
    allow_last_rail: bool = False
    allow_last_replica: bool = False
    override: list[Override] = Field(default_factory=list, max_length=len(OVERRIDES))


class Inject(Fault, Timed):
    """Inject a fault. `name` is for a later `revert`."""

    name: Name | None = None
    reason: str = Field(default="", max_length=200)


class Revert(Timed):
    """Take faults of this playbook back: all, or that of one name."""

    revert: Name


class _Membership(Timed):
    reason: str = Field(default="", max_length=200)
    wait: bool = True
    timeout: Duration = 60.0


class Drain(_Membership):
    """Let a replica leave at a step boundary."""

    drain: Words


class Evict(_Membership):
    """Take a replica out at once. `rejoin: false` keeps it out."""

    evict: Words
    rejoin: bool = True


class Rejoin(_Membership):
    """Bring a replica back, and wait until it contributes."""

    rejoin: Words


class Wait(Strict):
    """Until a condition holds; the playbook has failed if it does not in time."""

    wait: Condition
    timeout: Duration = 60.0


class Ensure(Strict):
    """As wait; a replica that is to contribute and was drained or evicted is asked to rejoin."""

    ensure: Condition
    timeout: Duration = 120.0


class Steps(Strict):
    """Until the job has committed so many steps more."""

    steps: int = Field(ge=1, le=1_000_000)
    timeout: Duration = 120.0


class Sleep(Strict):
    """Do nothing for a while."""

    sleep: Duration


class Expect(Strict):
    """A condition that holds, or comes to hold `within` a time."""

    expect: Condition
    within: Duration = 0.0


class Command(Strict):
    """A command of yours, without a shell; `exit` is the exit code it must have."""

    command: list[Words] = Field(min_length=1, max_length=100)
    exit: int = 0
    timeout: Duration = 30.0


class Http(Strict):
    """A GET of a URL, and the status it must answer with."""

    http: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=500)]
    status: int = Field(default=200, ge=100, le=599)
    timeout: Duration = 5.0
    within: Duration = 0.0


class Parallel(Strict):
    """Actions that begin at the same time; done when all are."""

    parallel: list[Action] = Field(min_length=1, max_length=64)


class Weighted(Fault):
    weight: float = Field(default=1.0, gt=0, le=1e6)


Mix = Annotated[
    list[Weighted],
    Field(min_length=1, max_length=64),
    BeforeValidator(mixes.expand, json_schema_input_type=str | list[Weighted]),
]


class StormPlan(Strict):
    """Faults at random intervals, exponential with this mean time between failures, drawn by weight. `mix: published`
    is that of the interruptions of a large job."""

    mtbf: Duration
    lasts: Duration
    mix: Mix

    @model_validator(mode="after")
    def _sensible(self) -> StormPlan:
        if not 0.1 <= self.mtbf <= 86400:
            raise ValueError("mtbf is between 100ms and 1d")
        if self.lasts <= 0:
            raise ValueError("lasts is more than nothing")
        return self


class Storm(Strict):
    """Faults at random intervals, see below."""

    storm: StormPlan


VERBS: dict[str, type[Strict]] = {
    "inject": Inject,
    "revert": Revert,
    "drain": Drain,
    "evict": Evict,
    "rejoin": Rejoin,
    "wait": Wait,
    "ensure": Ensure,
    "steps": Steps,
    "sleep": Sleep,
    "expect": Expect,
    "command": Command,
    "http": Http,
    "parallel": Parallel,
    "storm": Storm,
}


def _verb(value: Any) -> str | None:
    """Which action it is: the verb it has as a key (`evict` may have `rejoin` as well)."""
    if isinstance(value, dict):
        return next((verb for verb in VERBS if verb in value and not (verb == "rejoin" and "evict" in value)), None)
    return next((verb for verb, kind in VERBS.items() if type(value) is kind), None)


_one_verb = Discriminator(
    _verb,
    custom_error_type="no_verb",
    custom_error_message=f"an action is expected, one of {', '.join(VERBS)}",
)
Action = Annotated[
    Annotated[Inject, Tag("inject")]
    | Annotated[Revert, Tag("revert")]
    | Annotated[Drain, Tag("drain")]
    | Annotated[Evict, Tag("evict")]
    | Annotated[Rejoin, Tag("rejoin")]
    | Annotated[Wait, Tag("wait")]
    | Annotated[Ensure, Tag("ensure")]
    | Annotated[Steps, Tag("steps")]
    | Annotated[Sleep, Tag("sleep")]
    | Annotated[Expect, Tag("expect")]
    | Annotated[Command, Tag("command")]
    | Annotated[Http, Tag("http")]
    | Annotated[Parallel, Tag("parallel")]
    | Annotated[Storm, Tag("storm")],
    _one_verb,
]
Probe = Annotated[
    Annotated[Expect, Tag("expect")] | Annotated[Command, Tag("command")] | Annotated[Http, Tag("http")],
    Discriminator(
        _verb,
        custom_error_type="no_verb",
        custom_error_message="a probe is expected, one of expect, command, http",
    ),
]
StopIf = Annotated[list[Expect], Field(max_length=64)]


class Playbook(Strict):
    """One experiment."""

    version: Literal[1]
    name: Name
    description: str = Field(default="", max_length=2000)
    tags: list[Name] = Field(default_factory=list, max_length=32)
    environments: list[Name] = Field(default_factory=lambda: ["lab"], min_length=1, max_length=32)
    lab: Lab = Lab()
    repeat: int = Field(default=1, ge=1, le=MAX_REPEAT)
    timeout: Duration = 900.0
    vars: dict[Name, Scalar] = Field(default_factory=dict, max_length=100)
    steady_state: list[Probe] = Field(min_length=1, max_length=MAX_ACTIONS)
    method: list[Action] = Field(min_length=1, max_length=MAX_ACTIONS)
    objectives: Objectives = Objectives()
    protect: ProtectRules = Field(
        default_factory=ProtectRules,
        description="patterns of nodes, NICs and replicas that no fault of it may touch; agents have such rules too",
    )
    breaker: BreakerLimits = BreakerLimits()
    blast_radius: BlastNarrowed = Field(
        default_factory=BlastNarrowed,
        description="how much its faults may hit at once; the agents' own limits hold beside these",
    )
    stop_if: StopIf = Field(default_factory=list)
    cleanup: list[Action] = Field(default_factory=list, max_length=MAX_ACTIONS)

    @model_validator(mode="after")
    def _enough_repeats(self) -> Playbook:
        for name in type(self.objectives).model_fields:
            limits = getattr(self.objectives, name)
            if not isinstance(limits, Limits):
                continue
            needs = 100 if limits.p99 is not None else MIN_FOR_P95 if limits.p95 is not None else 1
            if self.repeat < needs:
                which = "p99" if limits.p99 is not None else "p95"
                raise ValueError(f"objectives.{name}: {which} needs repeat: {needs} or more (it is {self.repeat})")
        return self


Parallel.model_rebuild()
Playbook.model_rebuild()
