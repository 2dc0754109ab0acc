"""`python -m ftar_core.bench parity`: does a model become as good when replicas die while it is trained? The example's
model (bytes of the Python standard library), trained on the same tokens with and without a storm of failures: real
replicas and coordinator, real SIGKILLs at every point of a step, by a plan of the seed and of committed steps.

Every run trains every one of its tokens exactly once, so the storm changes only what it cannot help: with `none` an
update has fewer batches while replicas are away, and there are more updates; with `global_batch` an update has as many
as ever. Losses are nats a byte on text that nobody trained on, of the same seeds calm and stormy.

The verdict is that of two one-sided tests on the pairs (TOST, level 5 %), since a difference that was not found proves
nothing: `equivalent` is claimed only when the 90 % confidence interval of the mean difference lies within the margin.
The margin is the standard deviation between calm runs of different seeds: an effect below it is less than drawing other
initial weights does. With too few runs to say so the verdict is `undecided`.

`drains` drains replicas while a hot spare stands by; where as many contributed as in the calm run at every step, the
parameters and the optimizer's state must have the same bits at the end.
"""

from __future__ import annotations

import argparse
import math
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ftar_core.bench import parity_plan as plan
from ftar_core.bench.jobs import Parent
from ftar_core.bench.parity_raw import Record, differing, read_all, read_run
from ftar_core.bench.parity_rows import DIFFERENT, IDENTICAL, row, rows
from ftar_core.bench.parity_run import MODULE, Case, Task, run_case
from ftar_core.bench.report import BenchError, Column, Help, Report, UsageError, Value, ended, number
from ftar_core.native import require

CONTEXT, BATCH_SIZE, LEARNING_RATE, LAYERS, HEADS, WIDTH = 64, 2, 1e-3, 4, 4, 144  # the example's
BATCHES = ("none", "global_batch", "lr_scale")
LEAST_STEPS, MOST_SEEDS = 20, 1000
LOSS, SIGNED = number(".4f"), number("+.4f")


def _good(value: Value) -> bool:
    return value in ("the measure", "equivalent", "better", IDENTICAL)


COLUMNS = (
    Column("setting", "setting", 9),
    Column("batch", "batch", 14),
    Column("seeds", "seeds", 7),
    Column("failures", "failures", 10),
    Column("contributors_mean", "contributors", 14, number(".2f")),
    Column("loss_mean", "held-out loss", 15, LOSS),
    Column("loss_sd", "sd", 8, LOSS),
    Column("calm_loss_mean", "calm", 8, LOSS),
    Column("difference", "difference", 12, SIGNED),
    Column("ci_low", "90 % from", 11, SIGNED),
    Column("ci_high", "to", 9, SIGNED),
    Column("margin", "margin", 8, LOSS),
    Column("verdict", "  verdict", 2, lambda v: f"  {v}", _good),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    known = "; ".join(f"{storm.name}: {storm.says()}" for storm in plan.STORMS.values())
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench parity", description=__doc__, formatter_class=Help)
    parser.add_argument("--seeds", type=int, default=6, metavar="N", help="runs of each setting, with seeds 1 to N")
    parser.add_argument("--tokens", type=int, default=115_200, metavar="N", help="trained in each run")
    parser.add_argument("--replicas", type=int, default=3, metavar="N")
    parser.add_argument(
        "--storms",
        default=",".join((plan.DRAINS, *plan.STORMS)),
        help=f"{known}; drains: with a hot spare; or EVERY/OUT/DOWN: replicas DOWN at once, every EVERY steps, away"
        " for OUT. Beside calm runs, which are always made",
    )
    parser.add_argument(
        "--batch",
        default="none,global_batch",
        help="what an update does without some replicas: none (fewer batches), global_batch (as many as ever, in more"
        " steps), lr_scale (a rate scaled by the square root of the share)",
    )
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="of the model")
    parser.add_argument("--width", type=int, default=WIDTH, metavar="N", help="of the model, a multiple of 4")
    parser.add_argument("--margin", type=float, metavar="NATS", help="instead of the spread of calm runs")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep each run there: journals, events, logs. What is there is not run"
    )
    parser.add_argument(
        "--from",
        dest="read",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="run nothing, decide from what --out has kept, of several directories together",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw losses over tokens, and differences")
    parser.add_argument("--quick", action="store_true", help="a taste: 2 seeds, 23040 tokens, 25/8/1, drains")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.tokens, options.storms = 2, 23_040, "25/8/1,drains"
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    if not 2 <= options.seeds <= MOST_SEEDS:
        raise UsageError(f"--seeds: from 2 to {MOST_SEEDS}; one says nothing about chance")
    if not 2 <= options.replicas <= 16:
        raise UsageError("--replicas: from 2 to 16")
    if not 1 <= options.layers <= 64:
        raise UsageError("--layers: from 1 to 64")
    if not HEADS <= options.width <= 4096 or options.width % HEADS:
        raise UsageError(f"--width: a multiple of {HEADS} up to 4096")
    step = options.replicas * BATCH_SIZE * CONTEXT
    if not LEAST_STEPS * step <= options.tokens <= 1 << 32:
        raise UsageError(f"--tokens: at least {LEAST_STEPS * step} ({LEAST_STEPS} steps of {step}), at most {1 << 32}")
    if options.margin is not None and not (math.isfinite(options.margin) and options.margin > 0):
        raise UsageError("--margin: a number above 0 is expected")
    options.storms = [part.strip() for part in options.storms.split(",") if part.strip()]
    for name in options.storms:
        if name in (plan.CALM, plan.DRAINS):
            continue
        try:
            storm = plan.parse_storm(name)
        except ValueError as error:
            raise UsageError(f"--storms: {error}") from None
        if storm.down >= options.replicas:
            raise UsageError(f"--storms: {name!r}: {storm.down} of {options.replicas} replicas down leaves nobody")
    options.storms = list(dict.fromkeys(name for name in options.storms if name != plan.CALM))
    options.batch = list(dict.fromkeys(part.strip() for part in options.batch.split(",")))
    for name in options.batch:
        if name not in BATCHES:
            raise UsageError(f"--batch: {name!r}; there are {', '.join(BATCHES)}")
    if options.out is not None and options.read is not None:
        raise UsageError("--out and --from: with --from nothing is run")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UsageError(f"--out {options.out}: there is no directory {options.out.absolute().parent}")
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise UsageError(f"--svg {options.svg}: there is no directory {options.svg.absolute().parent}")


def task_of(options: argparse.Namespace) -> Task:
    step = options.replicas * BATCH_SIZE * CONTEXT
    return Task(
        replicas=options.replicas,
        tokens=options.tokens // step * step,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        layers=options.layers,
        heads=HEADS,
        width=options.width,
        context=CONTEXT,
    )


@contextmanager
def kept_in(out: Path | None) -> Iterator[Path]:
    """The directory of the runs; one that goes away if nobody wants them."""
    if out is not None:
        out.mkdir(exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="ftar-parity-") as made:
        yield Path(made)


def measure(options: argparse.Namespace, report: Report) -> list[Record]:
    """Runs what is not there yet, adds a row for each setting when it is complete."""
    task = task_of(options)
    settings = [plan.CALM, *options.storms]
    cases = [Case(s, b, seed) for b in options.batch for s in settings for seed in range(1, options.seeds + 1)]
    with kept_in(options.out) as directory:
        there = {record.case: record for record in read_all([directory])}
        for record in there.values():
            if record.task != task:
                raise UsageError(f"--out {directory}: {differing(record.task, task)}", hint="choose another directory")
        records: list[Record] = []
        with _parent(report) as parent:
            if parent.prepared < task.samples:
                raise UsageError(f"--tokens: at most {parent.prepared * CONTEXT}: there is no more text here")
            for done, case in enumerate(cases):
                if case not in there:

                    def tell(share: float, done: int = done, case: Case = case) -> None:
                        what = f"{case.setting}, {case.batch}, seed {case.seed}"
                        report.step(f"{what} (run {done + 1} of {len(cases)})", (done + share) / len(cases))

                    tell(0.0)
                    run_case(task, case, parent, directory, tell)
                    there[case] = read_run(directory / case.directory)
                records.append(there[case])
                if case.seed == options.seeds:
                    _add_row(case, records, options.margin, report)
    return records


def _parent(report: Report) -> Parent:
    report.step("importing torch", 0.0)
    return Parent(MODULE)


def _add_row(case: Case, records: Sequence[Record], margin: float | None, report: Report) -> None:
    mine = [r for r in records if r.case.batch == case.batch]
    calm = {r.case.seed: r for r in mine if r.case.setting == plan.CALM}
    report.add(row(case.setting, case.batch, [r for r in mine if r.case.setting == case.setting], calm, margin))


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.read is None:
        require()
        signal.signal(signal.SIGTERM, _stop)
    with Report("parity", COLUMNS, options.output) as report:
        if options.read is not None:
            records = read_all(options.read)
            if not records:
                raise UsageError(f"--from {options.read[0]}: no runs there")
            for made in rows(records, options.margin):
                report.add(made)
        else:
            records = measure(options, report)
        if options.svg is not None:
            from ftar_core.bench.parity_plot import draw_parity

            options.svg.write_text(draw_parity(records, options.margin))
    wrong = [str(r["verdict"]) for r in report.rows if str(r["verdict"]).startswith(("does not count", DIFFERENT))]
    if wrong:
        raise BenchError(f"{len(wrong)} settings failed: {wrong[0]}", hint="look at the journals that --out keeps")
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
