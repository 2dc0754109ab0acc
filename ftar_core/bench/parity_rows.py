"""The rows of `bench parity`: each setting against the calm runs of the same seeds. Pure functions of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from ftar_core.bench import parity_plan as plan
from ftar_core.bench.equivalence import compare
from ftar_core.bench.parity_raw import Record
from ftar_core.bench.report import Row

IDENTICAL, DIFFERENT = "bit-identical", "different bits"
DIGITS = 6


def dealings(record: Record) -> list[tuple[int | None, ...]]:
    """The batches of each step by slot: what a step's result depends on."""
    return [step.batches for step in record.steps]


def rows(records: Sequence[Record], margin: float | None = None) -> list[Row]:
    """One a batch treatment and setting, calm first. `margin`: nats; None: the standard deviation of calm runs."""
    found: list[Row] = []
    for batch in _unique(record.case.batch for record in records):
        mine = [record for record in records if record.case.batch == batch]
        calm = {r.case.seed: r for r in mine if r.case.setting == plan.CALM}
        for setting in sorted(_unique(r.case.setting for r in mine), key=_place):
            runs = sorted((r for r in mine if r.case.setting == setting), key=lambda r: r.case.seed)
            found.append(row(setting, batch, runs, calm, margin))
    return found


def row(setting: str, batch: str, runs: Sequence[Record], calm: dict[int, Record], margin: float | None) -> Row:
    losses = [run.held_out_loss for run in runs]
    base = [one.held_out_loss for one in calm.values() if not one.problem]
    limit = margin if margin is not None else stdev(base) if len(base) > 1 else None
    pairs = [(run, calm[run.case.seed]) for run in runs if run.case.seed in calm]
    made: Row = {
        "setting": setting,
        "batch": batch,
        "seeds": len(runs),
        "failures": sum(len(run.failures) for run in runs),
        "contributors_mean": round(fmean(run.contributors_mean for run in runs), 3),
        "steps_mean": round(fmean(len(run.steps) for run in runs), 1),
        "tokens": runs[0].tokens,
        "loss_mean": round(fmean(losses), DIGITS),
        "loss_sd": round(stdev(losses), DIGITS) if len(losses) > 1 else None,
        "train_loss_mean": round(fmean(run.train_loss for run in runs), DIGITS),
        "calm_loss_mean": round(fmean(one.held_out_loss for _, one in pairs), DIGITS) if pairs else None,
        "difference": None,
        "ci_low": None,
        "ci_high": None,
        "margin": round(limit, DIGITS) if limit is not None else None,
        "p": None,
        "verdict": "",
    }
    bad = [f"seed {one.case.seed}: {one.problem}" for one in (*runs, *(one for _, one in pairs)) if one.problem]
    if bad:
        made["verdict"] = f"does not count: {bad[0]}"
    elif setting == plan.CALM:
        made["verdict"] = "the measure"
    elif setting == plan.DRAINS:
        made["verdict"] = identity(pairs)
    elif len(pairs) < 2 or limit is None:
        made["verdict"] = f"{len(pairs)} seed{'' if len(pairs) == 1 else 's'} with a calm run: at least 2 are needed"
    else:
        finding = compare([run.held_out_loss - one.held_out_loss for run, one in pairs], limit)
        made["difference"], made["verdict"] = round(finding.difference, DIGITS), finding.verdict
        made["ci_low"], made["ci_high"] = round(finding.low, DIGITS), round(finding.high, DIGITS)
        made["p"] = round(finding.p, DIGITS) if finding.p is not None else None
    return made


def identity(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Where the same batches were trained in the same slots, nothing else may differ; where not, that is said."""
    if not pairs:
        return "no calm run of these seeds"
    same = [(run, calm) for run, calm in pairs if dealings(run) == dealings(calm)]
    odd = [run.case.seed for run, calm in same if run.digest != calm.digest]
    if odd:
        return f"{DIFFERENT}: seed {', '.join(map(str, odd))}"
    if len(same) < len(pairs):
        run, calm = next((run, calm) for run, calm in pairs if dealings(run) != dealings(calm))
        where = next(
            (i + 1 for i, (a, b) in enumerate(zip(dealings(run), dealings(calm), strict=False)) if a != b),
            min(len(run.steps), len(calm.steps)) + 1,
        )
        rest = f"other contributors in {len(pairs) - len(same)} (seed {run.case.seed} from step {where})"
        return f"{IDENTICAL} in {len(same)} of {len(pairs)}, {rest}" if same else f"not comparable: {rest}"
    return IDENTICAL


def _place(setting: str) -> tuple[int, str]:
    known = [plan.CALM, plan.DRAINS, *plan.STORMS]
    return (known.index(setting) if setting in known else len(known), setting)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
