"""Recovery objectives: the part of a playbook that says what is to be measured, and which value is still good."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIN_FOR_P95 = 20  # repeats: with fewer the 95th percentile is the maximum by another name


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True, populate_by_name=False
    )


class Limits(Strict):
    """The measured value of every incident, or a percentile over all of them, must not exceed these."""

    max: float | None = Field(default=None, ge=0)
    p50: float | None = Field(default=None, ge=0)
    p95: float | None = Field(default=None, ge=0)
    p99: float | None = Field(default=None, ge=0)
    of: Literal["survivors"] = "survivors"

    @model_validator(mode="after")
    def _some(self) -> Limits:
        if all(value is None for value in (self.max, self.p50, self.p95, self.p99)):
            raise ValueError("a limit is expected: max, p50, p95 or p99")
        return self


class AtLeast(Strict):
    """A share, 0 to 1."""

    min: float = Field(ge=0, le=1)


class Objectives(Strict):
    """Recovery objectives; `_ms` and `_s` say the unit."""

    detect_ms: Limits | None = Field(
        default=None,
        description="from the fault to the moment when the survivors, or the rail's own ends, know of it",
    )
    stall_ms: Limits | None = Field(
        default=None,
        description="(commit - last survivor's gradient) minus the median of 20 calm steps, the incident's worst step",
    )
    rejoin_s: Limits | None = Field(
        default=None,
        description="from the fault to the first step to which the replica contributed again",
    )
    steps_lost: Limits | None = Field(
        default=None,
        description="steps that a survivor had to compute again",
    )
    loss_delta: Limits | None = Field(
        default=None,
        description="mean loss of the last 5 steps of the method minus that of its first 5; falling is negative",
    )
    effective_time: AtLeast | None = Field(
        default=None,
        description="the share of the method's time that went into training, by the coordinator's account",
    )
    diverged: Limits | None = Field(
        default=None,
        description="replicas whose bits were found to differ",
    )
