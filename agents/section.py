"""The base of all parts of the agent's configuration: unknown keys are errors, and nothing is changed once it is
read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
