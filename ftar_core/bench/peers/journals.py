"""What the journals of a run say about its incidents. Pure: the same rows come out of journals that were kept.

Every system is measured by one number that needs nothing of its inside: the gap between two commits of *new* steps
(steps that nobody had committed before) on a replica that survives. Stall = the longest of the gaps that end with the
first three such commits after the fault, minus the median gap of 20 calm ones; a step that is thrown away or computed
again is in it, because no new step is committed meanwhile. `wait`: the same of (commit - last survivor's gradient
produced), which sees only what happens behind the gradients. Stall at rejoin = the longest gap after those three,
until the system was as it had been before, minus the calm one. All times are seconds of one CLOCK_MONOTONIC.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftar_core.bench.report import BenchError

CALM = 20
FIRST = 3  # commits after the fault in which its stall is looked for
AFTER = 2  # commits after the return that still count to the rejoin
MAX_LINE = 1 << 16

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Commit:
    step: int
    began: float
    produced: float
    at: float
    contributors: int


@dataclass(frozen=True)
class Incident:
    at: float
    victim: str
    over: float | None  # when everything was as before; None: the run ended first
    failed: bool = False  # ... but the system did not get there by itself


@dataclass
class Run:
    """What was done to one system in one go, and what its replicas wrote."""

    about: dict[str, Any]
    incidents: list[Incident]
    commits: dict[str, list[Commit]]  # of new steps, by replica, in the order of time
    thrown: dict[str, list[float]]  # when a computed step was thrown away
    redone: list[tuple[float, int]]  # (when, a step that had been committed before)
    first: dict[int, Commit] = field(default_factory=dict)  # of each step: its first commit anywhere


@dataclass(frozen=True)
class Cost:
    """Of one incident. Seconds; None: it cannot be told from this journal."""

    stall: float
    wait: float | None
    rejoin: float | None
    lost: int
    strength: float | None


def read_run(directory: Path) -> Run:
    """BenchError: these are no journals of this benchmark."""
    try:
        about = json.loads((directory / "about.json").read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{directory}: no journals of a run: about.json: {error}") from None
    if not isinstance(about, dict) or about.get("schema") != 1:
        raise BenchError(f"{directory}/about.json: of another version of this benchmark")
    marks = list(_lines(directory / "bench.jsonl"))
    lines = {name: list(_lines(directory / f"{name}.jsonl")) for name in about["replicas"]}
    try:
        return understand(about, marks, lines)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{directory}: a line of its journals is damaged: {error!r}") from None


def _lines(path: Path) -> Iterable[Line]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE):
            try:
                line = json.loads(raw)
            except ValueError:
                continue  # torn by a kill
            if isinstance(line, dict):
                yield line


def understand(about: dict[str, Any], marks: Iterable[Line], lines: Mapping[str, Sequence[Line]]) -> Run:
    incidents: list[Incident] = []
    for mark in marks:
        if mark["kind"] == "fault":
            incidents.append(Incident(float(mark["at"]), str(mark["victim"]), None))
        elif mark["kind"] == "over" and incidents:
            failed = bool(mark.get("failed", False))
            incidents[-1] = Incident(incidents[-1].at, incidents[-1].victim, float(mark["at"]), failed)
    commits: dict[str, list[Commit]] = {}
    thrown: dict[str, list[float]] = {}
    redone: list[tuple[float, int]] = []
    first: dict[int, Commit] = {}
    for name, mine in lines.items():
        seen, best = list[Commit](), 0
        for line in mine:
            if line["kind"] == "thrown":
                thrown.setdefault(name, []).append(float(line["t_produced"]))
            elif line["kind"] == "step":
                made = Commit(
                    int(line["step"]),
                    float(line["t_begin"]),
                    float(line["t_produced"]),
                    float(line["t_commit"]),
                    int(line["contributors"]),
                )
                if made.step <= best:
                    redone.append((made.at, made.step))
                    continue
                best = made.step
                seen.append(made)
                if made.step not in first or made.at < first[made.step].at:
                    first[made.step] = made
        commits[name] = seen
    return Run(about, incidents, commits, thrown, sorted(set(redone)), first)


def calm_gaps(run: Run, before: float | None = None) -> list[float]:
    """Between commits at full strength while nothing was wrong, in order of time; of all replicas together the median
    of each step."""
    full, found = int(run.about["wanted"]), dict[int, list[float]]()
    for mine in run.commits.values():
        for one, two in itertools.pairwise(mine):
            if two.step != one.step + 1 or one.contributors != full or two.contributors != full:
                continue
            if before is not None and two.at > before:
                break
            if any(i.at <= two.at and (i.over is None or one.at <= i.over) for i in run.incidents):
                continue
            found.setdefault(two.step, []).append(two.at - one.at)
    return [statistics.median(found[step]) for step in sorted(found)]


def calm_s(run: Run, before: float | None = None) -> float:
    """The median gap of the last 20 calm steps. BenchError: there are none."""
    gaps = calm_gaps(run, before)[-CALM:]
    if not gaps:
        raise BenchError(f"{run.about['system']}: no calm step before the fault", hint="more --calm steps")
    return statistics.median(gaps)


def usual_s(run: Run) -> float:
    """The median gap between new steps over the whole run, incidents and all: they are few among its steps."""
    times = [c.at for _, c in sorted(run.first.items())]
    return statistics.median(two - one for one, two in itertools.pairwise(times)) if len(times) > 1 else calm_s(run)


def cost(run: Run, number: int) -> Cost | None:
    """None: no survivor committed a new step afterwards by itself, or the run ended first."""
    incident = run.incidents[number]
    calm = calm_s(run, incident.at)
    end = run.incidents[number + 1].at if number + 1 < len(run.incidents) else float("inf")
    if incident.over is None or incident.failed:
        return None
    gaps: list[float] = []
    later: list[float] = []
    waits: list[float] = []
    strong: list[float] = []
    usual = _usual_wait(run, incident.at)
    survivors = _survivors(run, incident, calm)
    for name in survivors:
        mine = run.commits[name]
        after = [k for k, c in enumerate(mine) if incident.at < c.at < end and k > 0]
        if not after:
            return None
        for k in after[:FIRST]:
            gaps.append(mine[k].at - mine[k - 1].at)
            produced = [c.produced for other in survivors for c in run.commits[other] if c.step == mine[k].step]
            waits.append(mine[k].at - max(produced))
        back = sum(mine[k].at <= incident.over for k in after) + AFTER
        later += [mine[k].at - mine[k - 1].at for k in after[FIRST:back]]
        full = [
            mine[k].at for k in after if mine[k].began > incident.at and mine[k].contributors == run.about["wanted"]
        ]
        strong += full[:1]
    if not gaps:
        return None
    lost = max(
        (sum(incident.at - calm < t < incident.over for t in run.thrown.get(n, [])) for n in survivors), default=0
    )
    lost += len({step for at, step in run.redone if incident.at < at < end})
    return Cost(
        stall=max(0.0, max(gaps) - calm),
        wait=max(0.0, max(waits) - usual) if usual is not None else None,
        rejoin=max(0.0, max(later) - calm) if later and run.about["system"] != "restart" else None,
        lost=lost,
        strength=min(strong) - incident.at if strong else None,
    )


def _survivors(run: Run, incident: Incident, calm: float) -> list[str]:
    """Who had just committed a step, and was not hit."""
    recent = incident.at - 5 * calm
    return [
        name
        for name, mine in run.commits.items()
        if name != incident.victim and any(recent < c.at <= incident.at for c in mine)
    ]


def _usual_wait(run: Run, before: float) -> float | None:
    """The median of (commit - last gradient produced) of the last 20 steps at full strength."""
    last: dict[int, tuple[float, float]] = {}
    for mine in run.commits.values():
        for c in mine:
            if c.at <= before and c.contributors == run.about["wanted"]:
                produced, at = last.get(c.step, (0.0, 0.0))
                last[c.step] = (max(produced, c.produced), max(at, c.at))
    waits = [at - produced for _, (produced, at) in sorted(last.items())][-CALM:]
    return statistics.median(waits) if waits else None


def effective(run: Run) -> tuple[float, float] | None:
    """(share of the time that went into new steps at full strength, mean time between incidents). From the first
    incident to the end of the run; a step counts by how many contributed, and as long as a calm one takes."""
    if not run.incidents:
        return None
    begin = run.incidents[0].at
    end = float(run.about["ended"])
    calm, full = calm_s(run, begin), int(run.about["wanted"])
    if end <= begin:
        return None
    worth = sum(c.contributors for c in run.first.values() if begin < c.at <= end) * calm / full
    return min(1.0, worth / (end - begin)), (end - begin) / len(run.incidents)
