"""`python -m ftar_core.bench checkpoint`: what the steps beside a checkpoint take, against those of rounds without one.

Two replicas on loopback train the example's model in rounds of some steps: at the beginning of every other round a
checkpoint is due (copied, compared, written, synced), in the others not; the order changes. Steps are compared by their
place in the round, medians over the rounds: worst is the highest ratio of any place, and where that is (1 is the step
in which the copy is made). noise is the same between rounds without a checkpoint, half of them against the other half:
what worst would be if a checkpoint cost nothing. mean: of all steps of a round. longest: single steps, with and
without. cpu: what a round with a checkpoint takes more of a replica's CPU time (each writes every other one). Goal:
worst at most 1.05, where noise is below that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftar_core.bench.models import checked
from ftar_core.bench.nodes import require_drivers
from ftar_core.bench.overhead import measure
from ftar_core.bench.peers.signals import ended_by_signal
from ftar_core.bench.report import Column, Help, Report, Row, UsageError, at_most, ended, number, percentile

GOAL = 1.05
COLUMNS = [
    Column("model", "model", 9),
    Column("pace_ms", "pace", 8, number(".0f", " ms")),
    Column("state_bytes", "state", 9, lambda v: f"{float(v or 0) / 1e6:.0f} MB"),
    Column("rounds", "rounds", 7),
    Column("written", "written", 8),
    Column("step_ms", "step", 11, number(".1f", " ms")),
    Column("mean", "mean", 8, number(".3f")),
    Column("worst", "worst", 8, number(".3f"), at_most(GOAL)),
    Column("worst_at", "at", 4),
    Column("noise", "noise", 8, number(".3f")),
    Column("cpu_ms", "cpu", 9, number(".0f", " ms")),
    Column("longest_ms", "longest", 12, number(".1f", " ms")),
    Column("longest_without_ms", "without", 12, number(".1f", " ms")),
]


def worst(these: Sequence[Sequence[float]], those: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Of two kinds of rounds, each the times of its steps: the highest ratio of medians by place, and the place."""
    ratios = [
        percentile(mine, 0.5) / percentile(others, 0.5)
        for mine, others in zip(zip(*these, strict=True), zip(*those, strict=True), strict=True)
    ]
    return max((ratio, place) for place, ratio in enumerate(ratios))


def row(name: str, pace: int, lines: Sequence[Mapping[str, Any]]) -> Row:
    """As `-o json` prints it. `lines`: the sizes, then rounds with and without a checkpoint."""
    sizes, *rounds = lines
    with_one = [one["times"] for one in rounds if one["on"]]
    without = [one["times"] for one in rounds if not one["on"]]
    ratio, place = worst(with_one, without)
    mean = percentile([sum(times) for times in with_one], 0.5) / percentile([sum(times) for times in without], 0.5)
    return {
        "model": name,
        "pace_ms": pace,
        "state_bytes": int(sizes["state_bytes"]),
        "steps": len(with_one[0]),
        "rounds": len(with_one),
        "written": sum(bool(one["written"]) for one in rounds),
        "late": sum(bool(one["late"]) for one in rounds),
        "step_ms": round(percentile([s for times in without for s in times], 0.5) * 1000, 2),
        "mean": round(mean, 4),
        "worst": round(ratio, 4),
        "worst_at": place,
        "noise": round(worst(without[::2], without[1::2])[0], 4) if len(without) > 1 else None,
        "cpu_ms": round((_mean_cpu(rounds, on=True) - _mean_cpu(rounds, on=False)) * 1000, 1),
        "longest_ms": round(max(map(max, with_one)) * 1000, 2),
        "longest_without_ms": round(max(map(max, without)) * 1000, 2),
    }


def _mean_cpu(rounds: Sequence[Mapping[str, Any]], *, on: bool) -> float:
    taken = [float(one["cpu"]) for one in rounds if one["on"] is on]
    return sum(taken) / len(taken)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.bench checkpoint", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--models", default="example", help="the example's model, in these sizes")
    parser.add_argument("--paces", default="200,0", metavar="MS,...", help="forward and backward take at least so long")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=40, help="how often, with and without each")
    parser.add_argument("--directory", default=None, metavar="DIR", help="write below it [default: a temporary one]")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options: Any = parser.parse_args(argv)
    paces = [part.strip() for part in options.paces.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= 10_000 for part in paces):
        raise UsageError(f"--paces: {options.paces!r}: milliseconds up to 10000 are expected, such as 200,0")
    options.paces = [int(part) for part in paces]
    if options.directory is not None and not Path(options.directory).is_dir():
        raise UsageError(f"--directory: {options.directory} is no directory")
    if options.steps < 3:
        raise UsageError("--steps: at least 3: the step before the copy, that of the copy, and one behind it")
    return checked(options, "steps", "rounds")


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    if find_spec("torch") is None:
        raise UsageError("torch is not installed", hint="pip install 'ftctl[train]'")
    with ended_by_signal(), Report("checkpoint", COLUMNS, options.output) as report:
        cases = [(name, pace) for name in options.models for pace in options.paces]
        for k, (name, pace) in enumerate(cases):
            with (
                tempfile.TemporaryDirectory(prefix="ftar-checkpoint-") as directory,
                tempfile.TemporaryDirectory(prefix="ftar-kept-", dir=options.directory) as kept,
            ):
                lines: list[dict[str, Any]] = []
                about = {"kept": str(Path(kept) / "checkpoints"), "pace": pace}
                whole = 2 * options.rounds
                for line in measure(name, options.steps, whole, Path(directory), role="checkpoint", **about):
                    lines.append(line)
                    report.step(f"{name} at {pace} ms, round {len(lines)}", (k + len(lines) / (whole + 1)) / len(cases))
            report.add(row(name, pace, lines))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
