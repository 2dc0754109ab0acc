"""`python -m ftar_core.bench catchup`: the state of a healthy replica reaches one that comes back, against a bare TCP
copy of as many bytes over the same rail: one thread that sends the state's memory, one that receives into memory of its
own, and nothing else. In network namespaces of this benchmark's own: sources on one node, the
shadow on the other, every process with its own memory; the bare copy and the fetches take turns.

Seconds of a fetch run from the moment at which the shadow knows what it will get to the last byte verified, including
fresh memory for it; the copy of the state at a source is made beside its training and is shown for itself. A ratio is
the median of the ratios within a round of turns. CPU: seconds of all processes that take part, without those copies; on
a machine that has other things to do they say more than the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from ftar_core.bench.network import Network
from ftar_core.bench.nodes import Node, require_drivers
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

RATES, SOURCES, SIZE = "1000,0", "1,2", "512M"
GOAL = 0.70
UNIT = 1 << 20
ASKED_S = 20.0
TRIES = 5
COLUMNS = (
    Column("rail_mbit", "rail", 16, lambda v: f"{v} Mbit/s" if v else "unlimited"),
    Column("sources", "sources", 9),
    Column("bytes", "state", 10, lambda v: shown(float(v or 0))),
    Column("fetch_s", "fetch", 10, number(".2f", " s")),
    Column("bare_s", "bare copy", 11, number(".2f", " s")),
    Column("mbit", "user data", 14, number(".0f", " Mbit/s")),
    Column("ratio_bare", "x bare", 8, number(".2f"), at_least(GOAL)),
    Column("fetch_cpu_s", "CPU", 8, number(".2f", " s")),
    Column("bare_cpu_s", "bare CPU", 10, number(".2f", " s")),
    Column("copy_s", "copy at source", 16, number(".2f", " s")),
)


class _Late(Exception):
    """These sources were ready only when the others had given the whole state: their turn does not count."""


@dataclass(frozen=True)
class Turn:
    """Seconds of a copy or a fetch, of CPU, and of the copy that a source has made for it."""

    seconds: float
    cpu_s: float
    copy_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """One rail of the network as rail lists of a source and of the shadow."""

    source: list[list[str]]
    shadow: list[list[str]]


class Bench:
    """Everything that takes part in one network."""

    def __init__(self, stack: ExitStack, network: Network, sources: int, size: int) -> None:
        self._size = size
        rails = [[[d, d, a] for d, a in zip(network.devices, mine, strict=True)] for mine in network.addresses]
        self._place = Place(rails[0], rails[1])
        self._here, self._there = (mine[0] for mine in network.addresses)
        self._sources: dict[str, Node] = {}
        for n in range(sources):
            self._sources[f"r{n}"] = self._node(stack, f"source {n}", network, 0)
        self._shadow = self._node(stack, "shadow", network, 1)
        self._endpoints = {
            name: node.ask("hold", rails=self._place.source, size=size, mbit=0.0)
            for name, node in self._sources.items()
        }
        self._step = 0

    @staticmethod
    def _node(stack: ExitStack, name: str, network: Network, where: int) -> Node:
        node = Node(name, 0, {}, network.inside(where), module="ftar_core.bench.catchup_worker")
        stack.callback(node.kill)
        return node

    def _cpu_s(self, sources: Iterable[Node]) -> float:
        return sum(float(node.ask("cpu")) for node in (*sources, self._shadow))

    def bare(self) -> Turn:
        source = self._sources["r0"]
        before = self._cpu_s([source])
        port = source.ask("listen_bare", address=self._here)
        source.tell("send_bare", size=self._size)
        seconds = float(
            self._shadow.ask("receive_bare", here=self._there, address=self._here, port=port, size=self._size)
        )
        source.read()
        return Turn(seconds, self._cpu_s([source]) - before)

    def fetch(self, count: int, check: bool) -> Turn:
        """From `count` sources."""
        self._step += 1
        chosen = dict(list(self._sources.items())[:count])
        endpoints = {name: self._endpoints[name] for name in chosen}
        before = self._cpu_s(chosen.values())
        self._shadow.tell("fetch", rails=self._place.shadow, sources=endpoints, size=self._size, check=check)
        deadline = time.monotonic() + ASKED_S
        while not all(node.ask("asked") for node in chosen.values()):
            if time.monotonic() > deadline:
                raise BenchError("the shadow does not ask for a state")
            time.sleep(0.002)
        time.sleep(0.05)  # the stream has been asked for as well
        for node in chosen.values():
            node.tell("copy", step=self._step)
        copies = [node.read() for node in chosen.values()]
        seconds, given = self._shadow.read()
        if sum(given.values()) != self._size:
            raise BenchError(f"{sum(given.values())} of {self._size} bytes came: {given}")
        if set(given) != set(chosen):
            raise _Late(", ".join(sorted(set(chosen) - set(given))))
        used = self._cpu_s(chosen.values()) - before - sum(float(cpu_s) for _, cpu_s in copies)
        return Turn(float(seconds), used, max(float(copy_s) for copy_s, _ in copies))


def _turn(bench: Bench, count: int, check: bool) -> tuple[Turn, Turn]:
    """A fetch in which every source took part, beside a bare copy."""
    late = ""
    for _ in range(TRIES):
        bare = bench.bare()
        try:
            return bench.fetch(count, check), bare
        except _Late as error:
            late = str(error)
    raise BenchError(f"in {TRIES} tries {late} gave nothing before the others had given all: take a larger --size")


def measure(network: Network, sources: Sequence[int], size: int, rounds: int, report: Report) -> list[Row]:
    found: dict[int, list[tuple[Turn, Turn]]] = {count: [] for count in sources}
    with ExitStack() as stack:
        bench = Bench(stack, network, max(sources), size)
        for n in range(rounds):
            for count in sources:
                report.step(f"{count} sources, round {n + 1}", n / rounds)
                found[count].append(_turn(bench, count, check=n == 0))
    rows: list[Row] = []
    for count, turns in found.items():
        fetch = median(mine.seconds for mine, _ in turns)
        rows.append(
            {
                "rail_mbit": network.rates_mbit[0],
                "sources": count,
                "bytes": size,
                "rounds": rounds,
                "fetch_s": round(fetch, 3),
                "bare_s": round(median(bare.seconds for _, bare in turns), 3),
                "mbit": round(size * 8e-6 / fetch, 1),
                "ratio_bare": round(median(bare.seconds / mine.seconds for mine, bare in turns), 3),
                "fetch_cpu_s": round(median(mine.cpu_s for mine, _ in turns), 3),
                "bare_cpu_s": round(median(bare.cpu_s for _, bare in turns), 3),
                "copy_s": round(median(mine.copy_s for mine, _ in turns), 3),
                "goal": GOAL,
            }
        )
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.bench catchup", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--rates", default=RATES, help="of the rail in Mbit/s, with commas between; 0: no limit")
    parser.add_argument("--sources", default=SOURCES, help="how many replicas give the state, with commas between")
    parser.add_argument("--size", default=SIZE, help="of the state")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--quick", action="store_true", help="a short run: 32 MiB, one round")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.size, options.rounds = "32M", 1
    options.rates = [_whole("--rates", part, 0, 100_000) for part in options.rates.split(",")]
    options.sources = [_whole("--sources", part, 1, 8) for part in options.sources.split(",")]
    sizes = parse_sizes(options.size, least=UNIT, most=1 << 34, multiple=UNIT)
    if len(sizes) != 1:
        raise UsageError("--size: one size")
    options.size = sizes[0]
    if not 1 <= options.rounds <= 1000:
        raise UsageError("--rounds: from 1 to 1000")
    return options


def _whole(option: str, text: str, least: int, most: int) -> int:
    if not text.strip().isdecimal() or not least <= int(text) <= most:
        raise UsageError(f"{option}: {text!r}: whole numbers from {least} to {most} with commas between are expected")
    return int(text)


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    with Report("catchup", COLUMNS, options.output) as report:
        for rate in options.rates:
            with Network((rate, rate)) as network:
                rows = measure(network, options.sources, options.size, options.rounds, report)
            for row in rows:
                report.add(row)
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
