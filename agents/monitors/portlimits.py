"""From when on a port is not well: the settings `nics` and `rdma` of an agent, with the values that public tools use.

What is expected of a port (`expect_...`) goes before what its peers on the node have: two rails that are both slow
agree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from agents.api.words import Health
from agents.section import Section

DAY_S, HOUR_S, MINUTE_S = 86_400.0, 3600.0, 60.0
MAX_KEPT = 64  # moments of each kind that are remembered of a port

Seconds = Annotated[float, Field(gt=0, le=7 * DAY_S)]
Times = Annotated[int, Field(ge=1, le=MAX_KEPT)]


class FlapLimits(Section):
    """A port flaps when it lost its carrier `losses` times, or was down for `absence_s` or longer and came back
    `absences` times, within `window_s`. It counts as flapping until an operator clears it, or, if `clears_after_s` is
    given, until it has been quiet for so long. Bad `repair_times` times within `repair_within_s`: somebody is to
    repair it."""

    absence_s: Seconds = 25.0
    absences: Times = 3
    losses: Times = 5
    window_s: Seconds = DAY_S
    clears_after_s: Seconds | None = None
    repair_times: Times = 3
    repair_within_s: Seconds = HOUR_S


class NicLimits(Section):
    """Of the network devices that are rails."""

    window_s: float = Field(default=MINUTE_S, ge=1, le=HOUR_S)
    carrier_changes: int = Field(
        default=2, ge=0, le=1_000_000
    )  # more within the window are flapping: one unplugging is 2
    errors_per_s: float = Field(default=10.0, ge=0, le=1e9)
    gone_polls: int = Field(default=3, ge=1, le=1000)
    expect_speed_mbit: int | None = Field(default=None, ge=1, le=100_000_000)
    expect_duplex: Literal["full", "half"] | None = None
    expect_pcie_width: int | None = Field(default=None, ge=1, le=64)
    flaps: FlapLimits = FlapLimits()


class CounterRule(Section):
    """More than `over` of a counter within `window_s`; `per_s`: more than `over` a second."""

    over: float = Field(ge=0, le=1e12)
    health: Literal[Health.DEGRADED, Health.UNHEALTHY]
    window_s: float = Field(default=MINUTE_S, ge=1, le=HOUR_S)
    per_s: bool = False


_BAD, _WORSE = Health.DEGRADED, Health.UNHEALTHY
COUNTER_RULES: dict[str, tuple[CounterRule, ...]] = {
    "link_downed": (CounterRule(over=0, health=_WORSE),),
    "excessive_buffer_overrun_errors": (CounterRule(over=0, health=_WORSE),),
    "local_link_integrity_errors": (CounterRule(over=0, health=_WORSE),),
    "rnr_nak_retry_err": (CounterRule(over=0, health=_WORSE),),
    "symbol_error": (
        CounterRule(over=120, health=_WORSE, window_s=HOUR_S),
        CounterRule(over=10, health=_BAD, per_s=True),
    ),
    "link_error_recovery": (CounterRule(over=5, health=_BAD),),
    "port_rcv_errors": (CounterRule(over=10, health=_BAD, per_s=True),),
    "roce_slow_restart": (CounterRule(over=10, health=_BAD, per_s=True),),
    "local_ack_timeout_err": (CounterRule(over=1, health=_BAD, per_s=True),),
    "port_xmit_discards": (CounterRule(over=100, health=_BAD, per_s=True),),
}


class RdmaLimits(Section):
    """`counters`: rules in the place of the usual ones for a counter; an empty list: it is not judged."""

    counters: dict[str, list[CounterRule]] = Field(default_factory=dict)
    gone_polls: int = Field(default=3, ge=1, le=1000)
    expect_ports: int | None = Field(default=None, ge=0, le=256)  # that are up
    expect_rate_gbit: float | None = Field(default=None, gt=0, le=100_000)
    expect_pcie_width: int | None = Field(default=None, ge=1, le=64)
    flaps: FlapLimits = FlapLimits()

    @field_validator("counters")
    @classmethod
    def _counters_are_known(cls, counters: dict[str, list[CounterRule]]) -> dict[str, list[CounterRule]]:
        for name in counters:
            if name not in COUNTER_RULES:
                raise ValueError(f"there is no counter {name!r}; there are {', '.join(COUNTER_RULES)}")
        return counters

    @property
    def rules(self) -> tuple[tuple[str, CounterRule], ...]:
        """All in force, what is worst first."""
        found = [(name, rule) for name, usual in COUNTER_RULES.items() for rule in self.counters.get(name, usual)]
        return tuple(sorted(found, key=lambda one: one[1].health is not Health.UNHEALTHY))
