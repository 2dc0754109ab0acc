"""`python -m ftar_core.bench failover`: rails fail under the plugin's traffic, again and again, in network namespaces
of this benchmark's own (as root, or in a user namespace).

Two nodes, two rails, connections both ways on both rails, messages of mixed sizes back to back, every byte checked.
detect_ms: from the fault until a node knows it on all its connections over that rail (the other node is told over the
rail that lives: told_ms). gap_ms: the longest time that any connection had no message complete, from the fault until
the rail is back in use; for `both` it contains the time in which no rail worked (outage_ms). Detection has its default
settings; hold-down is short, so that the next fault may come.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftar_core.bench.faults import FAULTS, Watch, longest_gap_ms, recognised_ms
from ftar_core.bench.network import Network
from ftar_core.bench.nodes import ABI, Pair, require_drivers
from ftar_core.bench.report import BenchError, Column, Help, Report, Row, UsageError, at_most, ended, number, percentile

SETTINGS = "hold_down_ms=20,hold_down_max_ms=20,probe_interval_ms=10"
SMALL = [8, 512, 4096]
MIXED = [0, 8, 4096, 70_000, 262_144]
WINDOW = 8
SETTLE_S = 15.0
DRAIN_S = 40.0
CALM_S = 0.3
GOALS = {"carrier": (5, 50), "silent": (170, 250), "peer": (5, 50)}  # detect p99, gap p99
MS = number(".1f", " ms")


def columns() -> list[Column]:
    return [
        Column("fault", "fault", 8),
        Column("count", "count", 7),
        Column("detect_ms_p50", "detect p50", 12, MS),
        Column("detect_ms_p99", "p99", 10, MS),
        Column("told_ms_p99", "told p99", 11, MS),
        Column("gap_ms_p50", "gap p50", 11, MS),
        Column("gap_ms_p99", "p99", 10, MS),
        Column("gap_ms_max", "max", 10, MS),
        Column("outage_ms", "of that out", 13, MS),
        Column("bytes_checked", "checked", 11, lambda v: f"{float(v or 0) / (1 << 30):.1f} GiB"),
        Column("bytes_wrong", "wrong", 7, str, at_most(0)),
    ]


class Run:
    """The traffic between two nodes, and what faults do to it."""

    def __init__(self, network: Network, pair: Pair, seed: int) -> None:
        self.network, self.pair = network, pair
        self.dice = random.Random(seed)
        self.watch = Watch(pair)
        self.ends = 0  # of connections, on each node and rail
        stream = 0
        for sender in range(2):
            for device in range(len(network.devices)):
                for sizes in (SMALL, MIXED):
                    ends = pair.connect(sender, device)
                    for at, channel in ((1 - sender, ends[1]), (sender, ends[0])):
                        about = {"number": stream, "sizes": sizes, "window": WINDOW}
                        pair.nodes[at].ask("stream", channel=channel, sender=at == sender, **about)
                    stream += 1
        self.ends = stream
        for node in pair.nodes:
            node.ask("start")
        self.settle()
        self.counted = self.drain()

    def drain(self) -> tuple[int, int]:
        """Senders stop until everything has arrived; (bytes checked, bytes wrong) so far. BenchError: lost messages."""
        for node in self.pair.nodes:
            node.ask("pause", on=True)
        deadline = time.monotonic() + DRAIN_S
        while True:
            self.watch.poll()
            posted: dict[int, int] = {}
            came: dict[int, int] = {}
            checked = wrong = 0
            for node in self.pair.nodes:
                for stream, sender, sent, done, bytes_, bad, _ in node.ask("state")[1]:
                    (posted if sender else came)[stream] = sent if sender else done
                    if not sender:
                        checked, wrong = checked + bytes_, wrong + bad
            missing = {n: posted[n] - came[n] for n in posted if posted[n] != came[n]}
            if not missing:
                break
            if time.monotonic() > deadline:
                raise BenchError(f"messages never came, by connection: {missing}")
            time.sleep(0.005)
        for node in self.pair.nodes:
            node.ask("pause", on=False)
        return checked, wrong

    def settle(self) -> int:
        """Until all rails of all connections are good, and the traffic is where it belongs; when that was so."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            self.watch.poll()
            left = [f"{node.name}, {rail}" for node in self.pair.nodes for rail in node.ask("unsettled")]
            if not left:
                return time.monotonic_ns()
            if time.monotonic() > deadline:
                raise BenchError(f"the rails are not back {SETTLE_S:.0f} s after the repair: {'; '.join(left[:4])}")
            time.sleep(0.02)

    def gaps(self) -> list[tuple[int, int, int]]:
        return [gap for node in self.pair.nodes for gap in node.ask("gaps")]

    def calm(self) -> float:
        begun = time.monotonic_ns()
        time.sleep(CALM_S)
        self.watch.poll()
        return longest_gap_ms(self.gaps(), begun, time.monotonic_ns())

    def fault(self, name: str, count: int, tell: Any) -> Row:
        """`count` faults of one kind; the row as `-o json` prints it."""
        detected: list[float] = []
        told: list[float] = []
        gaps: list[float] = []
        outages: list[float] = []
        self.gaps()  # those of before
        for i in range(count):
            tell(i)
            kind = FAULTS[name]
            self.watch.forget()
            if kind is None:
                gaps.append(self.calm())
                continue
            done = kind.make(self.network, self.dice)
            settled = self.settle()
            knew, both = recognised_ms(self.watch, done, self.ends)
            detected += [knew] if knew is not None else []
            told += [both] if both is not None else []
            gaps.append(longest_gap_ms(self.gaps(), done.begun_ns, settled))
            outages.append(done.outage_ms)
        before = self.counted
        self.counted = self.drain()
        return {
            "fault": name,
            "count": count,
            "detect_ms_p50": _percentile(detected, 0.5),
            "detect_ms_p99": _percentile(detected, 0.99),
            "told_ms_p99": _percentile(told, 0.99),
            "gap_ms_p50": _percentile(gaps, 0.5),
            "gap_ms_p99": _percentile(gaps, 0.99),
            "gap_ms_max": _percentile(gaps, 1),
            "outage_ms": _percentile(outages, 0.5) if any(outages) else 0,
            "bytes_checked": self.counted[0] - before[0],
            "bytes_wrong": self.counted[1] - before[1],
        }


def _percentile(values: Sequence[float], share: float) -> float | None:
    return round(percentile(values, share), 2) if values else None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    kinds = "; ".join(f"{name}: {fault.what if fault else 'nothing, for comparison'}" for name, fault in FAULTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.bench failover", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--count", type=int, default=50, help="faults of each kind")
    parser.add_argument("--faults", default=",".join(FAULTS), help=kinds.replace("%", "%%"))
    parser.add_argument("--seed", type=int, default=1, help="which rail of which node is hit, and for how long")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the throughput through two failures")
    parser.add_argument("--quick", action="store_true", help="3 faults of each kind")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.count = 3
    if not 1 <= options.count <= 100_000:
        raise UsageError("--count: from 1 to 100000")
    options.faults = [name.strip() for name in options.faults.split(",")]
    for name in options.faults:
        if name not in FAULTS:
            raise UsageError(f"--faults: there is no fault {name!r}; there are {', '.join(FAULTS)}")
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise UsageError(f"--svg {options.svg}: there is no directory {options.svg.absolute().parent}")
    return options


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    with Report("failover", columns(), options.output) as report:
        parts = len(options.faults) + (options.svg is not None)
        with Network() as network:
            places = [network.inside(i) for i in range(2)]
            settings = {"FTAR_NET_OPTIONS": SETTINGS}
            with Pair("node", ABI, network.addresses, network.devices, places, **settings) as pair:
                traffic = Run(network, pair, options.seed)
                for k, name in enumerate(options.faults):

                    def tell(i: int, k: int = k, name: str = name) -> None:
                        report.step(f"{name} {i + 1} of {options.count}", (k + i / options.count) / parts)

                    report.add(traffic.fault(name, options.count, tell))
        if options.svg is not None:
            from ftar_core.bench.timeline import draw_failures

            report.step("throughput through a failure", len(options.faults) / parts)
            options.svg.write_text(draw_failures())
    wrong = sum(int(row["bytes_wrong"] or 0) for row in report.rows)
    if wrong:
        raise BenchError(f"{wrong} bytes were wrong")
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
