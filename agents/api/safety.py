"""What is asked of a fault beside itself, to keep a run from doing more harm than it was meant to (models.py has the
routes)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from agents.api.base import Answer, Request
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
