"""`python -m ftar_core.bench allreduce`: this project's ring, with its backup rail and heartbeats, against gloo through
torch.distributed and against a bare TCP ring, all three in the same processes, taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from ftar_core.errors import FtarError
from ftar_core.native import require

SIZES = "1K,16K,64K,1M,16M,64M"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STALL_S = 300.0  # a rank that says nothing for so long is taken for hung


def parse_sizes(text: str) -> list[int]:
    """ "1K,16M" -> bytes. ValueError names what is wrong."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,12})([KMG]?)", part.strip().upper())
        if match is None:
            raise ValueError(f"{part!r}: a size such as 64K, 1M or 256M is expected")
        size = int(match[1]) * _UNITS[match[2]]
        if size % 4 or not 4 <= size <= 1 << 30:
            raise ValueError(f"{part!r}: 4 bytes to 1G, a multiple of 4 (fp32)")
        sizes.append(size)
    return sizes


def parse_ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: numbers such as 2,4 are expected") from None
    if not all(2 <= n <= 64 for n in ranks):
        raise ValueError(f"{text!r}: from 2 to 64 ranks")
    return ranks


def run(ranks: int, sizes: list[int], seconds: float) -> Iterator[dict[str, float]]:
    """A row a size, as it is measured. RuntimeError: a rank failed; the text ends with its last words."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"ranks": ranks, "port": port, "token": secrets.token_hex(16), "sizes": sizes, "seconds": seconds}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "ftar_core.bench.allreduce_worker", json.dumps({**common, "rank": rank})],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for rank in range(ranks)
    ]
    try:
        first = workers[0]
        if first.stdout is None or first.stderr is None:
            raise RuntimeError("no pipes")
        for line in first.stdout:
            yield {"ranks": ranks, **json.loads(line)}
        words = first.stderr.read().strip().splitlines()
        if first.wait(STALL_S) != 0:
            raise RuntimeError(f"rank 0 failed: {words[-1] if words else 'without a word'}")
    finally:
        for worker in workers:
            if worker.poll() is None:
                try:
                    worker.wait(5 if worker is not workers[0] else 0.1)
                except subprocess.TimeoutExpired:
                    worker.kill()
            worker.wait()
            for pipe in (worker.stdout, worker.stderr):
                if pipe is not None:
                    pipe.close()


def row(found: dict[str, float]) -> dict[str, float]:
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


def shown(size: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench allreduce", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="processes, each one a rank on loopback")
    parser.add_argument("--sizes", default=SIZES, help="of the buffer (fp32)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each system at each size")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    try:
        ranks, sizes = parse_ranks(options.ranks), parse_sizes(options.sizes)
        if not 0 < options.seconds <= 600:
            raise ValueError("--seconds: more than 0 and at most 600")
        require()
        if find_spec("torch") is None:
            raise ValueError("torch is not installed, and gloo comes with it: pip install 'ftctl[train]'")
    except (ValueError, FtarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, float]] = []
    head = f"{'ranks':>5} {'size':>8} {'ours':>11} {'gloo':>11} {'wire':>11} {'x gloo':>7} {'x wire':>7}"
    try:
        for n in ranks:
            for found in run(n, sizes, options.seconds):
                line = row(found)
                rows.append(line)
                text = f"{n:>5} {shown(line['bytes']):>8}" + "".join(
                    f" {line[key]:>8.0f} us" for key in ("ours_us", "gloo_us", "wire_us")
                )
                text += f" {line['ratio_gloo']:>7.2f} {line['ratio_wire']:>7.2f}"
                out = sys.stderr if options.output == "json" else sys.stdout
                print(f"{head}\n{text}" if len(rows) == 1 else text, file=out, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.output == "json":
        print(json.dumps({"schema": 1, "bench": "allreduce", "rows": rows}))
    return 0
