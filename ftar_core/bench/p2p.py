"""`python -m ftar_core.bench p2p`: messages from one process to another through the plugin's interface, driven as
NCCL's progress thread drives it, against the same messages over a bare socket, and against the same plugin with one
rail and no heartbeat, which is what the protection costs.

The three take turns, each with a fresh connection. A time is the median of a system's turns, a ratio the median of the
ratios within a round of turns, so that what else the machine does hits both sides of it. One in flight: there and back,
half the time of the round trip. More: from the first send to the last message complete at the receiver.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from ftar_core.bench.network import Network
from ftar_core.bench.nodes import ABI, LOOPBACK, UNPROTECTED, Pair, require_drivers
from ftar_core.bench.report import (
    Column,
    Help,
    Report,
    Row,
    UsageError,
    at_least,
    at_most,
    ended,
    number,
    parse_sizes,
    shown,
)

SIZES = "4K,64K,1M,16M,64M"
ROUNDS = 15
LARGEST = 1 << 30
GOAL_SOCKET, GOAL_COST, GOAL_COST_SMALL = 0.97, 0.03, 0.15
US = number(".1f", " us")
COLUMNS = (
    Column("bytes", "size", 8, lambda v: shown(float(v or 0))),
    Column("in_flight", "in flight", 11),
    Column("ours_us", "ours", 13, US),
    Column("socket_us", "socket", 13, US),
    Column("unprotected_us", "unprotected", 13, US),
    Column("ratio_socket", "x socket", 10, number(".2f"), at_least(GOAL_SOCKET)),
    Column("protection_cost", "protection", 12, number("+.1%"), at_most(GOAL_COST_SMALL)),
)


@dataclass(frozen=True)
class Case:
    bytes: int
    in_flight: int


def once(pair: Pair, case: Case, count: int) -> float:
    """Microseconds a message, on fresh connections."""
    warm = max(2, count // 10)
    out = pair.connect(0)
    back = pair.connect(1) if case.in_flight == 1 else None
    try:
        if back is None:
            pair.transfer(out, case.bytes, warm, case.in_flight)
            return pair.transfer(out, case.bytes, count, case.in_flight) / count / 1e3
        for n in (warm, count):
            about = {"size": case.bytes, "count": n}
            (begun, done), _ = pair.both(
                "ping_pong",
                {"out": out[0], "into": back[1], "first": True, **about},
                {"out": back[0], "into": out[1], "first": False, **about},
            )
        return float(done - begun) / (2 * count) / 1e3
    finally:
        pair.nodes[0].ask("close", channel=out[0])
        pair.nodes[1].ask("close", channel=out[1])
        if back is not None:
            pair.nodes[1].ask("close", channel=back[0])
            pair.nodes[0].ask("close", channel=back[1])


def measure(pairs: Sequence[Pair], case: Case, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Microseconds a message by system, one for each of its turns. Who begins changes with every round."""
    slowest = max(once(pair, case, 3) for pair in pairs)
    count = max(3, min(20_000, int(seconds / rounds * 1e6 / slowest)))
    found: dict[str, list[float]] = {pair.name: [] for pair in pairs}
    for i in range(rounds):
        for k in range(len(pairs)):
            pair = pairs[(i + k) % len(pairs)]
            found[pair.name].append(once(pair, case, count))
    return found


def row(case: Case, found: dict[str, list[float]]) -> Row:
    ours, bare, unprotected = found["ours"], found["socket"], found["unprotected"]
    return {
        "bytes": case.bytes,
        "in_flight": case.in_flight,
        "rounds": len(ours),
        "ours_us": round(median(ours), 2),
        "socket_us": round(median(bare), 2),
        "unprotected_us": round(median(unprotected), 2),
        "ratio_socket": round(median(b / a for a, b in zip(ours, bare, strict=True)), 3),
        "protection_cost": round(median(a / b for a, b in zip(ours, unprotected, strict=True)) - 1, 3),
    }


def open_pairs(stack: ExitStack, network: Network | None) -> list[Pair]:
    addresses = network.addresses if network else [LOOPBACK, LOOPBACK]
    devices = network.devices if network else ()

    def one(name: str, abi: int, rails: int, **settings: str) -> Pair:
        places = [network.inside(i) for i in range(2)] if network else []
        return stack.enter_context(
            Pair(name, abi, [list(a)[:rails] for a in addresses], devices[:rails], places, **settings)
        )

    return [
        one("ours", ABI, 2),
        one("socket", 0, 1),
        one("unprotected", ABI, 1, FTAR_NET_OPTIONS=UNPROTECTED),
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench p2p", description=__doc__, formatter_class=Help)
    parser.add_argument("--sizes", default=SIZES, help="of a message, with --in-flight of them at a time")
    parser.add_argument("--in-flight", type=int, default=8, help="messages posted and not yet complete")
    parser.add_argument("--latency", default="4K", help="sizes that are also measured one at a time; '' for none")
    parser.add_argument("--seconds", type=float, default=3.0, help="about, for each system at each size")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each system")
    parser.add_argument("--lab", action="store_true", help="in network namespaces, two rails; else on loopback")
    parser.add_argument("--quick", action="store_true", help="a short run: small sizes, half a second each")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.seconds, options.rounds = "4K,1M", 0.5, 3
    if not 1 <= options.in_flight <= 32:
        raise UsageError("--in-flight: from 1 to 32, as many as NCCL has")
    if not 0 < options.seconds <= 600:
        raise UsageError("--seconds: more than 0 and at most 600")
    if not 1 <= options.rounds <= 1000:
        raise UsageError("--rounds: from 1 to 1000")
    latency = parse_sizes(options.latency, most=LARGEST) if options.latency else []
    sizes = parse_sizes(options.sizes, most=LARGEST)
    options.cases = [Case(n, 1) for n in latency] + [Case(n, options.in_flight) for n in sizes]
    return options


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if options.lab else None
        report = stack.enter_context(Report("p2p", COLUMNS, options.output))
        pairs = open_pairs(stack, network)
        for i, case in enumerate(options.cases):
            report.step(f"{shown(case.bytes)}, {case.in_flight} in flight", i / len(options.cases))
            report.add(row(case, measure(pairs, case, options.seconds, options.rounds)))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
