"""Rows of the recovery benchmark, from runs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ftar_core.bench.peers.curve import Curve, Losses, bound
from ftar_core.bench.peers.drive import TOO_SLOW, too_slow
from ftar_core.bench.peers.journals import Cost, Run, calm_s, cost, effective, usual_s
from ftar_core.bench.report import BenchError, Row, percentile

AT_RATIO = "@mtbf"  # behind the fault's name: a run at a given mean time between failures
FORMER = {"model": "example"}  # journals that do not say
Key = tuple[str, str]


def by_kind(runs: Sequence[Run], systems: Sequence[str]) -> dict[Key, list[Run]]:
    """Runs of the same (system, fault) belong together. BenchError: they are not of one experiment."""
    found: dict[Key, list[Run]] = {}
    for run in runs:
        found.setdefault((run.about["system"], run.about["fault"]), []).append(run)
    for what in ("step_ms", "model", "wanted", "place"):
        values = sorted({str(run.about.get(what, FORMER.get(what))) for run in runs})
        if len(values) > 1:
            raise BenchError(f"journals of different experiments: {what} {' and '.join(values)}")
    for (system, _), group in found.items():
        notes = sorted({run.about["notes"] for run in group})
        if len(notes) > 1:
            raise BenchError(f"journals of different experiments: {system} with {'; and with '.join(notes)}")
    order = {name: k for k, name in enumerate(systems)}
    return dict(sorted(found.items(), key=lambda item: (item[0][1], order.get(item[0][0], 99))))


def check_pace(runs: Sequence[Run]) -> None:
    """BenchError: the steps took so much longer than their pace, before the first incident or later (something else
    was running), that the figures would be of the machine."""
    for run in runs:
        calm_ms = max(calm_s(run, run.incidents[0].at if run.incidents else None), usual_s(run)) * 1000.0
        if calm_ms > TOO_SLOW * float(run.about["step_ms"]):
            raise too_slow(run.about["system"], calm_ms, float(run.about["step_ms"]))


def costs(runs: Sequence[Run]) -> tuple[list[Cost], int]:
    """(of each incident, number of incidents that the system did not recover from by itself)"""
    found, failed = list[Cost](), 0
    for run in runs:
        for number, incident in enumerate(run.incidents):
            one = cost(run, number)
            if one is not None:
                found.append(one)
            elif incident.over is not None:
                failed += 1
    return found, failed


def row(runs: Sequence[Run]) -> Row:
    about = runs[0].about
    scheduled = about["fault"].endswith(AT_RATIO)
    found, failed = ([], 0) if scheduled else costs(runs)
    shares = [(*one, len(run.incidents)) for run in runs if (one := effective(run)) is not None]
    incidents = sum(n for *_, n in shares)
    mtbf = sum(m * n for _, m, n in shares) / incidents if incidents else None
    share = sum(s * m * n for s, m, n in shares) / sum(m * n for _, m, n in shares) if incidents else None
    step_s = statistics.median(calm_s(r, r.incidents[0].at) for r in runs if r.incidents)
    stalls, waits = [c.stall for c in found], [c.wait for c in found if c.wait is not None]
    rejoins = [c.rejoin for c in found if c.rejoin is not None]
    strengths = [c.strength for c in found if c.strength is not None]
    return {
        "system": about["system"],
        "fault": about["fault"],
        "count": incidents if scheduled else len(found) + failed,
        "failed": failed,
        "model": about.get("model", FORMER["model"]),
        "step_s": _round(step_s),
        "stall_s_p50": _at(stalls, 0.5),
        "stall_s_p95": _at(stalls, 0.95),
        "stall_s_max": _at(stalls, 1),
        "stall_s_mean": _mean(stalls),
        "wait_s_p95": _at(waits, 0.95),
        "steps_lost": sum(c.lost for c in found) if found else None,
        "rejoin_stall_s_p95": _at(rejoins, 0.95),
        "rejoin_stall_s_mean": _mean(rejoins),
        "full_strength_s": _mean(strengths),
        "effective_time": _round(share, 4),
        "mtbf_s": _round(mtbf, 2),
        "mtbf_steps": _round(None if mtbf is None else mtbf / step_s, 1),
        "notes": about["notes"],
    }


def _round(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _at(values: Sequence[float], share: float) -> float | None:
    return round(percentile(values, share), 3) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 3) if values else None


def curves(rows: Sequence[Row], fault: str) -> list[Curve]:
    """One a system, of what it lost to this fault, with what its run at a given MTBF came to."""
    made = []
    for one in rows:
        if one["fault"] != fault or one["stall_s_mean"] is None:
            continue
        losses = Losses(
            stall=float(one["stall_s_mean"]),
            rejoin=float(one["rejoin_stall_s_mean"] or 0),
            degraded=float(one["full_strength_s"] or 0),
            synchronous=one["system"] == "restart",
        )
        measured = [
            (float(r["mtbf_s"]), float(r["effective_time"]))
            for r in rows
            if r["system"] == one["system"]
            and r["fault"] == fault + AT_RATIO
            and r["mtbf_s"] is not None
            and r["effective_time"] is not None
        ]
        made.append(Curve(str(one["system"]), losses, measured))
    return made


def bounds(rows: Sequence[Row], replicas: int) -> None:
    """Into each row at a given MTBF: what would be left with nothing lost but the missing replica's own work."""
    degraded = {r["system"]: r["full_strength_s"] for r in rows if r["fault"] == "sigkill"}
    for one in rows:
        away, mtbf = degraded.get(one["system"]), one["mtbf_s"]
        if (
            str(one["fault"]).endswith(AT_RATIO)
            and away is not None
            and mtbf is not None
            and one["system"] != "restart"
        ):
            one["bound"] = round(bound(float(away), float(mtbf), replicas), 4)
