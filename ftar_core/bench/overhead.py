"""`python -m ftar_core.bench overhead`: what a step takes in a session and in DDP over gloo, when nothing fails.

Two replicas on loopback, each of which trains two equal models in turn, not paced: some steps of one, as many of the
other, the order changing with each round. ratio: ours / DDP of a round, the median and quartiles of all rounds. cpu:
the same of a replica's processor time, all threads. memory (private bytes of a replica with its gradients there, beyond
the same training without anybody else): retained is the gradients kept for a retry, as a multiple of their size;
buffers is all else that a session takes; ddp what DDP takes.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftar_core.bench.models import SHAPES, checked
from ftar_core.bench.nodes import require_drivers
from ftar_core.bench.peers.forks import Forks
from ftar_core.bench.peers.signals import ended_by_signal
from ftar_core.bench.report import BenchError, Column, Help, Report, Row, UsageError, at_most, ended, number, percentile

RANKS = 2
JOB = "bench"
ROUND_S = 600.0
MIB = 1 << 20
COLUMNS = [
    Column("model", "model", 9),
    Column("gradient_bytes", "gradients", 11, lambda v: f"{float(v or 0) / 1e6:.0f} MB"),
    Column("ours_ms", "ours", 12, number(".1f", " ms")),
    Column("ddp_ms", "ddp", 12, number(".1f", " ms")),
    Column("ratio", "ours / ddp", 12, number(".3f"), at_most(1.02)),
    Column("ratio_low", "quartiles", 11, number(".3f")),
    Column("ratio_high", "", 8, number(".3f")),
    Column("cpu_ratio", "cpu", 8, number(".3f")),
    Column("retained_x", "retained", 10, number(".2f", " x"), at_most(1)),
    Column("buffers_mib", "buffers", 11, number(".0f", " MiB"), at_most(64)),
    Column("ddp_mib", "ddp's", 11, number(".0f", " MiB")),
]


def measure(
    name: str, steps: int, rounds: int, directory: Path, *, role: str = "overhead", **more: object
) -> Iterator[dict[str, Any]]:
    """First the sizes, then the times of each round, by replicas of that role (peers/stable.py), which get `more`.
    BenchError: a replica failed."""
    (directory / "token").touch(mode=0o600)
    (directory / "token").write_text(secrets.token_hex(16))
    found, port = directory / "found", directory / "port"
    with Forks(directory, ()) as forks:
        arguments = [
            *("--job", JOB, "--replicas", str(RANKS), "--min-replicas", str(RANKS), "--listen", "127.0.0.1:0"),
            *("--store", str(directory / "store"), "--token-file", str(directory / "token")),
            *("--port-file", str(port)),
        ]
        forks.start("coordinator", "coordinator", arguments=arguments)
        _wait(forks, port)
        for rank in range(RANKS):
            environment = {
                "FTAR_COORDINATOR": f"127.0.0.1:{port.read_text().strip()}",
                "FTAR_JOB": JOB,
                "FTAR_REPLICA": f"r{rank}",
                "FTAR_TOKEN_FILE": str(directory / "token"),
                "FTAR_RAILS": "a=127.0.0.1,b=127.0.0.2",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            about = {"rank": rank, "shape": SHAPES[name], "steps": steps, "rounds": rounds, "found": str(found), **more}
            forks.start(f"r{rank}", role, environment=environment, rendezvous=str(directory / "rendezvous"), **about)
        for count in range(1, rounds + 2):
            yield json.loads(_wait(forks, found, count)[count - 1])


def _wait(forks: Forks, path: Path, lines: int = 1) -> list[str]:
    """So many whole lines of a file. BenchError: a process has ended before, or nothing comes."""
    deadline = time.monotonic() + ROUND_S
    while True:
        text = path.read_text() if path.exists() else ""
        if text.count("\n") >= lines:
            return text.splitlines()
        for end in forks.ended():
            raise BenchError(f"{end.name} ended with {end.code}: {forks.last_words(end.name)}")
        if time.monotonic() > deadline:
            raise BenchError(f"nothing is measured within {ROUND_S:.0f} s")
        time.sleep(0.02)


def row(name: str, steps: int, sizes: Mapping[str, float], times: Sequence[Mapping[str, float]]) -> Row:
    """As `-o json` prints it."""
    ratios = [one["ours"] / one["ddp"] for one in times]
    buffers = sizes["grown_ours"] - sizes["retained_bytes"]
    return {
        "model": name,
        "gradient_bytes": int(sizes["gradient_bytes"]),
        "steps": steps,
        "rounds": len(times),
        "ours_ms": round(percentile([one["ours"] for one in times], 0.5) * 1000, 2),
        "ddp_ms": round(percentile([one["ddp"] for one in times], 0.5) * 1000, 2),
        "ratio": round(percentile(ratios, 0.5), 4),
        "ratio_low": round(percentile(ratios, 0.25), 4),
        "ratio_high": round(percentile(ratios, 0.75), 4),
        "cpu_ratio": round(percentile([one["ours_cpu"] / one["ddp_cpu"] for one in times], 0.5), 4),
        "retained_x": round(sizes["retained_bytes"] / sizes["gradient_bytes"], 3),
        "buffers_mib": round(buffers / MIB, 1),
        "ddp_mib": round(sizes["grown_ddp"] / MIB, 1),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.bench overhead", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="the example's model, in these sizes")
    parser.add_argument("--steps", type=int, default=10, help="of each system in a round")
    parser.add_argument("--rounds", type=int, default=15, help="how often")
    parser.add_argument("--quick", action="store_true", help="the example's size, 5 rounds")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options: Any = parser.parse_args(argv)
    if options.quick:
        options.models, options.rounds = "example", 5
    return checked(options, "steps", "rounds")


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    if find_spec("torch") is None:
        raise UsageError("torch is not installed, and DDP comes with it", hint="pip install 'ftctl[train]'")
    with ended_by_signal(), Report("overhead", COLUMNS, options.output) as report:
        for k, name in enumerate(options.models):
            with tempfile.TemporaryDirectory(prefix="ftar-overhead-") as directory:
                lines: list[dict[str, float]] = []
                for line in measure(name, options.steps, options.rounds, Path(directory)):
                    lines.append(line)
                    share = (k + len(lines) / (options.rounds + 1)) / len(options.models)
                    report.step(f"{name}, round {len(lines)}", share)
            report.add(row(name, options.steps, lines[0], lines[1:]))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
