"""`python -m ftar_core.bench commit`: how soon a step is committed everywhere, in jobs of thousands of ranks.

The coordinator is the real one, the leaders are the job's own classes, each in a process of its own; ranks are
simulated, with a socket each, and do nothing but report and take orders (bench/commit_ranks.py). Heartbeats run beside
at the default interval.

A rank on its leader's node is connected by a Unix socket, one on another node by TCP. The simulated ones are all on one
node: `--ranks tcp` connects them as if none was on its leader's.

COMMIT is the time from the moment when the last rank has reported to the moment when the commit has arrived at the
socket of the last rank. In a job every rank has a core of its own; here all share one machine, so the simulated ranks
run when the others leave a core free, and what they cost is told: "ranks" is their share of all CPU time. SEEN is the
time until they have read it too. EPOCH: a replica's leader is killed, until every rank that is left has the new epoch.
JOIN: its next life has caught up, until every rank is in the epoch with it (it waits for the end of a step).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from ftar_core.bench.commit_run import running
from ftar_core.bench.limits import raise_descriptors
from ftar_core.bench.report import Column, Help, Report, Row, UsageError, at_most, ended, number, percentile

SHAPES = "16x640,156x64,1024x1"
GOAL_MS = 50.0
MOST_RANKS, MOST_REPLICAS = 65536, 2048
MS = number(".1f", " ms")
COLUMNS = (
    Column("shape", "shape", 9),
    Column("ranks", "ranks", 7),
    Column("way", "over", 5),
    Column("commit_ms_p50", "commit p50", 12, MS, at_most(GOAL_MS)),
    Column("commit_ms_p99", "p99", 10, MS),
    Column("seen_ms_p50", "seen p50", 11, MS),
    Column("coordinator_cpu_ms", "coord CPU", 11, MS),
    Column("leader_cpu_ms", "leader CPU", 12, MS),
    Column("ranks_cpu_share", "ranks", 7, lambda v: "-" if v is None else f"{float(v):.0%}"),
    Column("epoch_ms", "epoch", 10, MS),
    Column("join_ms", "join", 10, MS),
    Column("coordinator_mib", "coord", 9, number(".0f", " MiB")),
    Column("leader_mib", "leader", 9, number(".1f", " MiB")),
)


def measure(replicas: int, ranks: int, options: argparse.Namespace, report: Callable[[str, float], None]) -> Row:
    with running(replicas, ranks, options.steps, options.period_ms / 1000, near=options.ranks == "unix") as run:
        report("starting", 0)
        run.start()
        commit, seen, used = run.commits(report)
        coordinator_mib, leader_mib = run.memory_mib()
        report("a replica is lost and comes back", 1)
        epoch_ms = join_ms = None
        if replicas > 1:
            epoch_ms = run.lose(f"r{replicas - 1}")
            join_ms = run.join(f"r{replicas - 1}")
        unix = sum(run.near.values())
    total = sum(used.values())
    return {
        "shape": f"{replicas}x{ranks}",
        "replicas": replicas,
        "ranks": replicas * ranks,
        "way": "unix" if unix == replicas * (ranks - 1) > 0 else "both" if unix else "tcp",
        "unix_sockets": unix,
        "commits": len(commit),
        "period_ms": options.period_ms,
        "commit_ms_p50": round(percentile(commit, 0.5), 2),
        "commit_ms_p99": round(percentile(commit, 0.99), 2),
        "commit_ms_max": round(max(commit), 2),
        "seen_ms_p50": round(percentile(seen, 0.5), 2),
        "seen_ms_p99": round(percentile(seen, 0.99), 2),
        "coordinator_cpu_ms": round(used["coordinator"] / len(commit) * 1000, 2),
        "leader_cpu_ms": round(used["leaders"] / len(commit) / replicas * 1000, 2) if ranks > 1 else None,
        "ranks_cpu_share": round(used["ranks"] / total, 3) if total else None,
        "cpu_s": round(total, 2),
        "epoch_ms": None if epoch_ms is None else round(epoch_ms, 1),
        "join_ms": None if join_ms is None else round(join_ms, 1),
        "coordinator_mib": round(coordinator_mib, 1),
        "leader_mib": None if leader_mib is None else round(leader_mib, 2),
    }


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """ "16x640,1024x1" -> [(16, 640), (1024, 1)]: replicas x ranks of each."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", part.strip())
        if match is None:
            raise UsageError(f"{part!r}: replicas x ranks of each, such as 16x640, is expected")
        replicas, ranks = int(match[1]), int(match[2])
        if not 1 <= replicas <= MOST_REPLICAS or not 1 <= ranks <= MOST_RANKS or replicas * ranks > MOST_RANKS:
            raise UsageError(f"{part!r}: 1 to {MOST_REPLICAS} replicas, and at most {MOST_RANKS} ranks together")
        shapes.append((replicas, ranks))
    return shapes


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench commit", description=__doc__, formatter_class=Help)
    parser.add_argument("--shape", default=SHAPES, help="replicas x ranks of each")
    parser.add_argument("--steps", type=int, default=200, help="commits that are measured")
    parser.add_argument("--period-ms", type=float, default=1000.0, help="length of a step: the ranks report together")
    parser.add_argument("--ranks", choices=("unix", "tcp"), default="unix", help="how they reach their leader")
    parser.add_argument("--quick", action="store_true", help="a short run: 4x16 and 32x1, 20 commits each")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.shape, options.steps, options.period_ms = "4x16,32x1", 20, 100.0
    options.shape = parse_shapes(options.shape)
    if not 1 <= options.steps <= 100_000:
        raise UsageError("--steps: 1 to 100000")
    if not 10 <= options.period_ms <= 60_000:
        raise UsageError("--period-ms: 10 to 60000")
    return options


def bench(argv: Sequence[str]) -> int:
    options = parse(argv)
    if sys.platform != "linux":
        raise UsageError("this benchmark needs Linux")
    for replicas, ranks in options.shape:
        raise_descriptors(max(ranks + replicas, -(-replicas // max(1, min(os.cpu_count() or 1, replicas))) * ranks))
    with Report("commit", COLUMNS, options.output) as report:
        for i, (replicas, ranks) in enumerate(options.shape):

            def step(what: str, share: float, i: int = i, shape: str = f"{replicas}x{ranks}") -> None:
                report.step(f"{shape}, {what}", (i + share) / len(options.shape))

            report.add(measure(replicas, ranks, options, step))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: bench(argv))
