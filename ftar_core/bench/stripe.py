"""`python -m ftar_core.bench stripe`: what several rails carry together. In network namespaces of this benchmark's own,
rails limited to a rate (tbf): a bare TCP stream on the first rail, the plugin on that rail alone, and the plugin
striped over all, of equal and of unequal rate; they take turns. Rates are of user data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from ftar_core.bench.network import Network
from ftar_core.bench.nodes import ABI, Pair, require_drivers
from ftar_core.bench.report import Column, Help, Report, Row, UsageError, Value, ended, number, parse_sizes, shown

RATES = "1000+1000,1000+250"
MODES = ("socket", "backup", "stripe")
GOAL_ALONE = 0.98  # of a bare stream, on one rail
GOAL_STRIPED = 0.95  # of the sum of what the rails carry
WINDOW = 8
ROUNDS = 3


def columns() -> list[Column]:
    def met(value: Value) -> bool:
        return value is True

    return [
        Column("rails_mbit", "rails", 12),
        Column("mode", "mode", 9),
        Column("mbit", "user data", 14, number(".0f", " Mbit/s")),
        Column("ratio_rail", "x bare rail", 13, number(".3f")),
        Column("goal", "goal", 8, number(".2f")),
        Column("met", "met", 6, lambda v: "-" if v is None else "yes" if v else "no", met),
    ]


@dataclass(frozen=True)
class Case:
    rates_mbit: tuple[int, ...]
    mode: str

    def goal(self) -> float | None:
        """Of what a bare stream carries on the first rail."""
        if self.mode == "socket":
            return None
        if self.mode == "backup":
            return GOAL_ALONE
        return round(GOAL_STRIPED * sum(self.rates_mbit) / self.rates_mbit[0], 3)

    @property
    def rails(self) -> int:
        return len(self.rates_mbit) if self.mode == "stripe" else 1

    def shown(self) -> str:
        return "+".join(str(rate) for rate in self.rates_mbit[: self.rails])


def once(pair: Pair, size: int, count: int) -> float:
    """Mbit/s of user data."""
    ends = pair.connect(0)
    try:
        pair.transfer(ends, size, max(2, count // 5), WINDOW)  # TCP finds the rate
        return size * count * 8e3 / pair.transfer(ends, size, count, WINDOW)
    finally:
        pair.nodes[0].ask("close", channel=ends[0])
        pair.nodes[1].ask("close", channel=ends[1])


def open_pair(network: Network, case: Case) -> Pair:
    places = [network.inside(i) for i in range(2)]
    settings = {"FTAR_NET_OPTIONS": "mode=stripe"} if case.mode == "stripe" else {}
    addresses = [list(mine)[: case.rails] for mine in network.addresses]
    abi = 0 if case.mode == "socket" else ABI
    return Pair(case.mode, abi, addresses, network.devices[: case.rails], places, **settings)


def parse_rates(text: str) -> list[tuple[int, ...]]:
    """ "1000+250" -> (1000, 250). UsageError names what is wrong."""
    found = []
    for part in text.split(","):
        rates = part.strip().split("+")
        if not all(rate.isdecimal() and 10 <= int(rate) <= 100_000 for rate in rates) or not 2 <= len(rates) <= 4:
            raise UsageError(
                f"--rates: {part!r}: two to four rates in Mbit/s (10 to 100000) such as 1000+250 are expected"
            )
        found.append(tuple(int(rate) for rate in rates))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench stripe", description=__doc__, formatter_class=Help)
    parser.add_argument("--rates", default=RATES, help="of the rails, in Mbit/s; several sets with commas between")
    parser.add_argument("--modes", default=",".join(MODES), help="the plugin's, and socket (always measured)")
    parser.add_argument("--size", default="1M", help=f"of a message; {WINDOW} are in flight")
    parser.add_argument("--seconds", type=float, default=6.0, help="about, for each mode at each set of rates")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each mode")
    parser.add_argument("--quick", action="store_true", help="a second each")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.seconds, options.rounds = 1.0, 2
    options.rates = parse_rates(options.rates)
    options.modes = [mode.strip() for mode in options.modes.split(",")]
    for mode in options.modes:
        if mode not in MODES:
            raise UsageError(f"--modes: there is no mode {mode!r}; there are {', '.join(MODES)}")
    sizes = parse_sizes(options.size, most=1 << 30)
    if len(sizes) != 1:
        raise UsageError("--size: one size")
    options.size = sizes[0]
    if not 0 < options.seconds <= 600:
        raise UsageError("--seconds: more than 0 and at most 600")
    if not 1 <= options.rounds <= 1000:
        raise UsageError("--rounds: from 1 to 1000")
    return options


def measure(network: Network, cases: Sequence[Case], size: int, seconds: float, rounds: int) -> dict[Case, float]:
    """Median Mbit/s of each case; they take turns."""
    found: dict[Case, list[float]] = {case: [] for case in cases}
    with ExitStack() as stack:
        pairs = {case: stack.enter_context(open_pair(network, case)) for case in cases}
        for _ in range(rounds):
            for case, pair in pairs.items():
                rate = sum(case.rates_mbit[: case.rails])
                count = max(WINDOW, int(rate * 1e6 / 8 * seconds / rounds / size))
                found[case].append(once(pair, size, count))
    return {case: median(values) for case, values in found.items()}


def row(case: Case, found: dict[Case, float], bare: float) -> Row:
    goal, ratio = case.goal(), found[case] / bare
    return {
        "rails_mbit": case.shown(),
        "mode": case.mode,
        "mbit": round(found[case], 1),
        "ratio_rail": round(ratio, 3),
        "goal": goal,
        "met": None if goal is None else ratio >= goal,
    }


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    require_drivers()
    with Report("stripe", columns(), options.output) as report:
        for i, rates in enumerate(options.rates):
            bare = Case(rates, "socket")
            # One rail alone is the same in every set of rates that begins alike: once is enough.
            known = {(r[0], m) for r in options.rates[:i] for m in ("socket", "backup")}
            cases = [bare] + [Case(rates, m) for m in MODES[1:] if m in options.modes and (rates[0], m) not in known]
            report.step(f"{'+'.join(map(str, rates))} Mbit/s, {shown(options.size)} messages", i / len(options.rates))
            with Network(rates) as network:
                found = measure(network, cases, options.size, options.seconds, options.rounds)
            for case in cases:
                if (rates[0], case.mode) not in known:
                    report.add(row(case, found, found[bare]))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
