"""Throughput through a failure, measured and drawn: rails of 1 Gbit/s, one connection through the plugin, small
messages back to back; a rail fails and is repaired, and the traffic goes and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ftar_core.bench.faults import Switch, Watch, forward, link
from ftar_core.bench.network import Network
from ftar_core.bench.nodes import ABI, Pair
from ftar_core.bench.report import BenchError
from ftar_core.bench.svg import Mark, Panel, Span, draw

RATE_MBIT = 1000
SIZE = 16 * 1024
WINDOW = 32
BIN_MS = 10
WARM_S = 0.5  # TCP finds its rate
FAIL_MS, REPAIR_MS, END_MS = 250, 600, 1200
LATEST_MS = 10_000  # for a machine so busy that all of it takes longer
# A shorter hold-down and quicker echoes than the defaults' one second, so that the return fits into the picture.
SETTINGS = "hold_down_ms=150,hold_down_max_ms=150,probe_interval_ms=20"


@dataclass
class Measured:
    """Milliseconds from the beginning of the picture; throughput in Gbit/s by bin."""

    gbit: list[float]
    carried: list[tuple[float, int]] = field(default_factory=list)  # from when on, by which rail
    failed: float = 0.0
    repaired: float = 0.0
    detected: float | None = None


def measure(switch: Switch) -> Measured:
    """One failure of rail 0 of the sending node. BenchError: the traffic broke, or did not come back."""
    with Network((RATE_MBIT, RATE_MBIT)) as network:
        places = [network.inside(i) for i in range(2)]
        with Pair("node", ABI, network.addresses, network.devices, places, FTAR_NET_OPTIONS=SETTINGS) as pair:
            watch = Watch(pair)
            ends = pair.connect(0)
            for node in (1, 0):
                pair.nodes[node].ask(
                    "stream", channel=ends[node], sender=node == 0, number=0, sizes=[SIZE], window=WINDOW
                )
            for i in (1, 0):
                pair.nodes[i].ask("start")
            time.sleep(WARM_S)
            begin = time.monotonic_ns()
            pair.nodes[1].ask("record", from_ns=begin, bin_ns=BIN_MS * 1_000_000, bins=LATEST_MS // BIN_MS)
            failed = _at(begin, FAIL_MS, watch, lambda: switch(network, 0, 0, False))
            repaired = _at(begin, REPAIR_MS, watch, lambda: switch(network, 0, 0, True))
            end = END_MS
            while True:
                _at(begin, end + BIN_MS, watch, lambda: None)
                watch.poll()
                if watch.said("carries the data", begin + int(repaired * 1e6), 0, 0) or end >= LATEST_MS:
                    break
                end += 200
            bins = pair.nodes[1].ask("recorded")[: end // BIN_MS]
    out = Measured([n * 8 / (BIN_MS * 1e6) for n in bins], failed=failed, repaired=repaired)
    out.carried = [(0.0, 0)]
    for line in sorted(watch.lines, key=lambda line: line.ns):
        at = (line.ns - begin) / 1e6
        if line.says == "DOWN" and at >= failed and out.detected is None:
            out.detected = at
        if line.node == 0 and line.says == "carries the data" and at > 0:
            out.carried.append((at, line.rail))
    if out.detected is None or [rail for _, rail in out.carried] != [0, 1, 0]:
        raise BenchError(f"the traffic did not go to the other rail and come back: {out.carried}")
    return out


def _at(begin_ns: int, ms: float, watch: Watch, act: Callable[[], None]) -> float:
    """Do it then; when it was begun."""
    while (left := begin_ns + int(ms * 1e6) - time.monotonic_ns()) > 0:
        time.sleep(min(left / 1e9, 0.02))
        if left > 50_000_000:
            watch.poll()
    begun = time.monotonic_ns()
    act()
    return (begun - begin_ns) / 1e6


def panel(title: str, found: Measured) -> Panel:
    ends = [at for at, _ in found.carried[1:]] + [float(len(found.gbit) * BIN_MS)]
    detected = found.detected or 0.0
    moved, back = found.carried[1][0], found.carried[2][0]
    noticed = f"recognised after {detected - found.failed:.1f} ms, moved after {moved - found.failed:.1f} ms"
    return Panel(
        title=title,
        values=found.gbit,
        bin_ms=BIN_MS,
        top=RATE_MBIT / 1000 * 1.25,
        unit="Gbit/s",
        spans=[Span(at, end, f"rail{rail}", rail) for (at, rail), end in zip(found.carried, ends, strict=True)],
        marks=[
            Mark(found.failed, "fails"),
            Mark(detected, noticed),
            Mark(found.repaired, "repaired"),
            Mark(back, f"back after {back - found.repaired:.0f} ms"),
        ],
    )


KINDS: Sequence[tuple[str, Switch]] = (
    ("A NIC loses its carrier", link),
    ("A rail drops every frame in silence, carrier up", forward),
)


def draw_failures() -> str:
    """An SVG of both kinds."""
    panels = [panel(title, measure(switch)) for title, switch in KINDS]
    return draw("One connection over two rails of 1 Gbit/s, throughput in bins of 10 ms", panels)
