"""Two sets of runs of the same playbooks, measure by measure: has recovery become slower?

Medians and the worst case of every measure. The length of a step before anything was done tells apart "the machine was
slow today" from "recovery got slower": a time may grow by as much as those steps did. A playbook without incidents
(`control`) has nothing else; where it was run on both days, it speaks for those that tell nothing themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ftctl.playbook.judging import OF_A_STOPWATCH
from ftctl.report.reading import Run

SLOWER = "machine slower"
CONTROL = "control"  # the playbook that does nothing
MEASURES = ("detect_ms", "stall_ms", "rejoin_s", "steps_lost")
# Below these a difference is the clock's or the scheduler's, not the code's.
NOISE = {"detect_ms": 10.0, "stall_ms": 25.0, "rejoin_s": 0.5, "steps_lost": 0.0}


@dataclass(frozen=True)
class Row:
    playbook: str
    measure: str
    before: float | None
    after: float | None
    judgement: str  # same | better | worse | new | gone | machine slower

    @property
    def change(self) -> str:
        if self.before is None or self.after is None or self.before == 0:
            return "-"
        return f"{(self.after / self.before - 1) * 100:+.0f} %"

    @staticmethod
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"


def compare_runs(before: Sequence[Run], after: Sequence[Run], *, tolerance: float) -> list[Row]:
    olds, news = {run.name: run for run in before}, {run.name: run for run in after}
    rows: list[Row] = []
    control = (olds.get(CONTROL), news.get(CONTROL))
    machine = _slower((control[0].calm_ms, control[1].calm_ms)) or 1.0 if control[0] and control[1] else 1.0
    for name in dict.fromkeys([*olds, *news]):
        old, new = olds.get(name), news.get(name)
        if old is None or new is None:
            rows.append(Row(name, "verdict", None, None, "new" if old is None else "gone"))
            continue
        calm = (old.calm_ms, new.calm_ms)
        slower = _slower(calm) or machine
        rows.append(Row(name, "step_ms", *calm, SLOWER if slower > 1 + tolerance else "same"))
        for measure in MEASURES:
            for which, of in (("p50", median), ("max", max)):
                values = (_values(old, measure), _values(new, measure))
                if not any(values):
                    continue
                was, now = (of(v) if v else None for v in values)
                rows.append(Row(name, f"{measure} {which}", was, now, _judge(measure, was, now, tolerance, slower)))
        if old.passed and not new.passed:
            rows.append(Row(name, f"verdict: {new.word}", None, None, "worse"))
    return rows


def _values(run: Run, measure: str) -> list[float]:
    return [float(cost[measure]) for cost in run.costs if cost.get(measure) is not None]


def _slower(calm: tuple[float | None, float | None]) -> float | None:
    """How many times slower the machine has become, by the length of undisturbed steps; None: they do not tell."""
    before, after = calm
    return max(1.0, after / before) if before and after else None


def _judge(measure: str, before: float | None, after: float | None, tolerance: float, slower: float) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if after > before * (1 + tolerance) and after - before > NOISE[measure]:
        explained = measure in OF_A_STOPWATCH and after <= before * (1 + tolerance) * slower
        return SLOWER if explained else "worse"
    if before > after * (1 + tolerance) and before - after > NOISE[measure]:
        return "better"
    return "same"
