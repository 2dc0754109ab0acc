"""Two sets of runs of the same playbooks, measure by measure: has recovery become slower?

Medians and the worst case of every measure. The length of a step tells apart "the machine was slow today" from
"recovery got slower"; a playbook without incidents (`control`) has nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ftctl.report.reading import Run

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
    for name in dict.fromkeys([*olds, *news]):
        old, new = olds.get(name), news.get(name)
        if old is None or new is None:
            rows.append(Row(name, "verdict", None, None, "new" if old is None else "gone"))
            continue
        step = (_step_ms(old), _step_ms(new))
        slower = step[0] is not None and step[1] is not None and step[1] > step[0] * (1 + tolerance)
        rows.append(Row(name, "step_ms", *step, "machine slower" if slower else "same"))
        for measure in MEASURES:
            for which, of in (("p50", median), ("max", max)):
                values = (_values(old, measure), _values(new, measure))
                if not any(values):
                    continue
                was, now = (of(v) if v else None for v in values)
                rows.append(Row(name, f"{measure} {which}", was, now, _judge(measure, was, now, tolerance)))
        if old.passed and not new.passed:
            rows.append(Row(name, f"verdict: {new.word}", None, None, "worse"))
    return rows


def _values(run: Run, measure: str) -> list[float]:
    return [float(cost[measure]) for cost in run.costs if cost.get(measure) is not None]


def _step_ms(run: Run) -> float | None:
    steps = [float(s["step_ms"]) for s in run.of("sample") if s.get("step_ms") is not None]
    return median(steps) if steps else None


def _judge(measure: str, before: float | None, after: float | None, tolerance: float) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if after > before * (1 + tolerance) and after - before > NOISE[measure]:
        return "worse"
    if before > after * (1 + tolerance) and before - after > NOISE[measure]:
        return "better"
    return "same"
