"""What is asked of a fault beside itself, to keep a run from doing more harm than it was meant to (models.py has the
routes)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from agents.api.base import Answer, Request
from agents.api.blast import NO_LIMITS, Blast, Fleet, Hit
from agents.api.protect import MAX_RULES, Protection, pattern_problem

Patterns = Annotated[list[str], Field(max_length=MAX_RULES)]


class ProtectRules(Request):
    """Patterns of what no fault may touch (protect.py)."""

    nodes: Patterns = Field(default_factory=list)
    nics: Patterns = Field(default_factory=list)
    replicas: Patterns = Field(default_factory=list)

    @field_validator("nodes", "nics", "replicas")
    @classmethod
    def _are_patterns(cls, patterns: list[str], info: ValidationInfo) -> list[str]:
        for pattern in patterns:
            if problem := pattern_problem(str(info.field_name), pattern):
                raise ValueError(problem)
        return patterns

    def of(self, source: str) -> Protection:
        return Protection(tuple(self.nodes), tuple(self.nics), tuple(self.replicas), source)


class ProtectSaid(ProtectRules):
    """With where they stand: of a request, the playbook it came from."""

    source: str = Field(min_length=1, max_length=200)

    def protection(self) -> Protection:
        return self.of(self.source)


class ProtectView(Answer):
    """Rules that hold on a node, in the words of the file they stand in."""

    nodes: list[str] = Field(default_factory=list)
    nics: list[str] = Field(default_factory=list)
    replicas: list[str] = Field(default_factory=list)
    source: str = ""

    def protection(self) -> Protection:
        return Protection(tuple(self.nodes), tuple(self.nics), tuple(self.replicas), self.source)


class BlastSettings(Request):
    """How much may be hit at once (blast.py); the defaults hold where nothing is said."""

    faults: int = Field(default=Blast.faults, ge=1, le=100_000)
    nodes_percent: float = Field(default=Blast.nodes_percent, gt=0, le=100)
    replicas_percent: float = Field(default=Blast.replicas_percent, gt=0, le=100)
    same_replica: bool = Blast.same_replica

    def of(self, source: str) -> Blast:
        return Blast(self.faults, self.nodes_percent, self.replicas_percent, self.same_replica, source)


class BlastNarrowed(Request):
    """A playbook's own limits: they hold beside those of the agents, and what is not given is theirs alone."""

    faults: int | None = Field(default=None, ge=1, le=100_000)
    nodes_percent: float | None = Field(default=None, gt=0, le=100)
    replicas_percent: float | None = Field(default=None, gt=0, le=100)
    same_replica: bool | None = None


class BlastSaid(BlastNarrowed):
    """With where they stand."""

    source: str = Field(min_length=1, max_length=200)

    def limits(self) -> Blast:
        return replace(NO_LIMITS, **self.model_dump(exclude_none=True))


class BlastView(Answer):
    """What holds on a node."""

    faults: int
    nodes_percent: float
    replicas_percent: float
    same_replica: bool
    source: str = ""

    def limits(self) -> Blast:
        return Blast(self.faults, self.nodes_percent, self.replicas_percent, self.same_replica, self.source)


class HitSaid(Request):
    """A fault that is in force, or is just asked for, on another node."""

    id: str = Field(max_length=64)
    kind: str = Field(default="", max_length=64)
    node: str = Field(max_length=64)
    replicas: list[str] = Field(default_factory=list, max_length=256)

    def hit(self) -> Hit:
        return Hit(self.id, self.kind, self.node, tuple(self.replicas))


class FleetSaid(Request):
    """What whoever asks for a fault knows of the cluster. It can only make the agent refuse more."""

    nodes: int = Field(default=0, ge=0, le=1_000_000)
    silent: list[str] = Field(default_factory=list, max_length=10_000)
    hits: list[HitSaid] = Field(default_factory=list, max_length=4096)

    def fleet(self) -> Fleet:
        return Fleet(nodes=self.nodes, silent=tuple(self.silent), hits=tuple(one.hit() for one in self.hits))
