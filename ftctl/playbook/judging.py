"""Measured values against objectives. Pure. What was not measured meets no objective, and says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftctl.playbook.measuring import Cost
from ftctl.playbook.objectives import AtLeast, Limits, Objectives

PER_INCIDENT = ("detect_ms", "stall_ms", "rejoin_s", "steps_lost")
OF_A_STOPWATCH = ("detect_ms", "stall_ms", "rejoin_s")  # longer on a slow machine, though nothing is wrong
SELDOM = ("detect_ms", "rejoin_s")  # asked of those incidents to which they apply; at least one must


@dataclass(frozen=True)
class Judged:
    """One objective: `measured` None means that it could not be, and `reason` why."""

    name: str  # stall_ms p95
    limit: float
    measured: float | None
    count: int
    met: bool
    reason: str = ""
    slower: float = 1.0  # than its pace was the machine (ftctl/playbook/pace.py)

    @property
    def allowed(self) -> float:
        """The limit on this machine today."""
        return allowed(self.name.split()[0], self.limit, self.slower)


def judge(
    objectives: Objectives,
    costs: Sequence[Cost],
    *,
    whole: dict[str, float | None],
    why_not: dict[str, str],
    slower: float = 1.0,
) -> list[Judged]:
    """`whole`: what is measured of the run and not of an incident (loss_delta, effective_time, diverged). `slower`: how
    many times the machine is slower than its pace; limits of times are for one that keeps it."""
    judged: list[Judged] = []
    for name in type(objectives).model_fields:
        wanted = getattr(objectives, name)
        if isinstance(wanted, AtLeast):
            why = why_not.get(name, "not measured")
            judged.append(_at_least(name, wanted.min, whole.get(name), why, slower=slower))
        elif isinstance(wanted, Limits):
            judged += _limits(name, wanted, costs, whole, why_not, slower=slower)
    return judged


def allowed(name: str, limit: float, slower: float) -> float:
    """The limit of a measure on a machine that is so many times slower than its pace. Of a time, as many times as much;
    of the share of a job's time that went into training, as many times as much of the rest."""
    if name == "effective_time":
        return max(0.0, 1.0 - (1.0 - limit) * slower)
    return limit * slower if name in OF_A_STOPWATCH else limit


def _at_least(name: str, limit: float, measured: float | None, why_not: str, *, slower: float) -> Judged:
    met = measured is not None and measured >= allowed(name, limit, slower)
    reason = "" if measured is not None else why_not
    return Judged(f"{name} min", limit, measured, int(measured is not None), met, reason, slower)


def _limits(
    name: str,
    wanted: Limits,
    costs: Sequence[Cost],
    whole: dict[str, float | None],
    why_not: dict[str, str],
    *,
    slower: float,
) -> list[Judged]:
    if name in PER_INCIDENT:
        values = [value for cost in costs if (value := getattr(cost, name)) is not None]
        untold = [cost.missing[name] for cost in costs if getattr(cost, name) is None and name in cost.missing]
        if name not in SELDOM and len(values) < len(costs):
            untold = untold or ["not measured for every incident"]
        reason = untold[0] if untold else "" if values else why_not.get(name, "no incident to measure it of")
    else:
        value = whole.get(name)
        values = [] if value is None else [value]
        reason = "" if values else why_not.get(name, "not measured")
    found = []
    for which in ("p50", "p95", "p99", "max"):
        limit = getattr(wanted, which)
        if limit is None:
            continue
        measured = percentile(values, 100.0 if which == "max" else float(which[1:])) if values else None
        met = measured is not None and not reason and measured <= allowed(name, limit, slower)
        found.append(Judged(f"{name} {which}", limit, measured, len(values), met, reason, slower))
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: a value that was measured, never one between two. 100 is the maximum."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100.0) - 1)]


def document(judged: Judged) -> dict[str, Any]:
    return {
        "objective": judged.name,
        "limit": judged.limit,
        "allowed": round(judged.allowed, 4),
        "measured": None if judged.measured is None else round(judged.measured, 4),
        "count": judged.count,
        "met": judged.met,
        "reason": judged.reason,
    }
