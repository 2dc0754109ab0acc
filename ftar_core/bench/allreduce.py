"""`python -m ftar_core.bench allreduce`: this project's ring, with its backup rail and heartbeats, against gloo through
torch.distributed and against a bare TCP ring, all three in the same processes, taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from ftar_core.bench.nodes import require_drivers
from ftar_core.bench.report import (
    BenchError,
    Column,
    Help,
    Report,
    Row,
    UsageError,
    at_least,
    ended,
    number,
    parse_sizes,
    shown,
)

SIZES = "1K,16K,64K,1M,16M,64M"
LARGEST = 1 << 30
FP32 = 4
STALL_S = 300.0  # a rank that says nothing for so long is taken for hung
US = number(".0f", " us")
COLUMNS = (
    Column("ranks", "ranks", 5),
    Column("bytes", "size", 9, lambda v: shown(float(v or 0))),
    Column("ours_us", "ours", 12, US),
    Column("gloo_us", "gloo", 12, US),
    Column("wire_us", "wire", 12, US),
    Column("ratio_gloo", "x gloo", 8, number(".2f"), at_least(1)),
    Column("ratio_wire", "x wire", 8, number(".2f"), at_least(0.85)),
)


def parse_ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r}: numbers such as 2,4 are expected") from None
    if not all(2 <= n <= 64 for n in ranks):
        raise UsageError(f"{text!r}: from 2 to 64 ranks")
    return ranks


def run(ranks: int, sizes: list[int], seconds: float) -> Iterator[dict[str, float]]:
    """A row a size, as it is measured. BenchError: a rank failed; the text ends with its last words."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {
        "parent": os.getpid(),
        "ranks": ranks,
        "port": port,
        "token": secrets.token_hex(16),
        "sizes": sizes,
        "seconds": seconds,
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = tempfile.TemporaryFile()  # noqa: SIM115  closed below
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "ftar_core.bench.allreduce_worker", json.dumps({**common, "rank": rank})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=words if rank == 0 else subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for rank in range(ranks)
    ]
    try:
        first = workers[0]
        if first.stdout is None:
            raise RuntimeError("no pipe")
        for line in first.stdout:
            yield {"ranks": ranks, **json.loads(line)}
        if first.wait(STALL_S) != 0:
            words.seek(0)
            said = words.read().decode(errors="replace").strip().splitlines()
            raise BenchError(f"rank 0 failed: {said[-1] if said else 'without a word'}")
    finally:
        for worker in workers:
            if worker.poll() is None:
                try:
                    worker.wait(5 if worker is not workers[0] else 0.1)
                except subprocess.TimeoutExpired:
                    worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        words.close()


def row(found: dict[str, float]) -> Row:
    """As `-o json` prints it: ratios above 1 mean that ours is faster."""
    ours, gloo, wire = found["ours"], found["gloo"], found["wire"]
    return {
        "ranks": int(found["ranks"]),
        "bytes": int(found["bytes"]),
        "count": int(found["count"]),
        "ours_us": round(ours, 1),
        "gloo_us": round(gloo, 1),
        "wire_us": round(wire, 1),
        "ratio_gloo": round(gloo / ours, 2),
        "ratio_wire": round(wire / ours, 2),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.bench allreduce", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--ranks", default="2,4", help="processes, each one a rank on loopback")
    parser.add_argument("--sizes", default=SIZES, help="of the buffer (fp32), 4 bytes to 1G")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each system at each size")
    parser.add_argument("--quick", action="store_true", help="a short run: 2 ranks, 64K and 1M, half a second each")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.ranks, options.sizes, options.seconds = "2", "64K,1M", 0.5
    options.ranks = parse_ranks(options.ranks)
    options.sizes = parse_sizes(options.sizes, least=FP32, most=LARGEST, multiple=FP32)
    if not 0 < options.seconds <= 600:
        raise UsageError("--seconds: more than 0 and at most 600")
    return options


def bench(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    if find_spec("torch") is None:
        raise UsageError("torch is not installed, and gloo comes with it", hint="pip install 'ftctl[train]'")
    cases = [(n, size) for n in options.ranks for size in options.sizes]
    with Report("allreduce", COLUMNS, options.output) as report:
        for n in options.ranks:
            rows = run(n, options.sizes, options.seconds)
            for size in options.sizes:
                report.step(f"{n} ranks, {shown(size)}", cases.index((n, size)) / len(cases))
                found = next(rows, None)
                if found is None:
                    break
                report.add(row(found))
            for _ in rows:  # to the end: that is where a rank's failure shows
                pass
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: bench(argv))
