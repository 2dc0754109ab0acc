"""Recovery objectives: what is to be measured, and which value is good; and what ends a run whatever it measures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agents.api.breaker import AFTER_S, NODES_PERCENT, REPLICAS_PERCENT
from ftctl.playbook.strict import Duration, Strict

MIN_FOR_P95 = 20  # repeats: with fewer the 95th percentile is the maximum by another name


class BreakerLimits(Strict):
    """When fewer replicas contribute, or fewer nodes answer, for longer than `after`, all faults are halted and the run
    is stopped; 0: never. `ftctl faults allow` ends that."""

    replicas_percent: float = Field(default=REPLICAS_PERCENT, ge=0, le=100)
    nodes_percent: float = Field(default=NODES_PERCENT, ge=0, le=100)
    after: Duration = AFTER_S


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
    bytes_corrupted: Limits | None = Field(
        default=None,
        description="bytes that arrived as others than were sent; a lab with `job: nccl` checks every one",
    )
