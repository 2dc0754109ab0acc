"""What the failover benchmark does to rails, and what it reads from the plugin's log about it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ftar_core.bench.network import Network
from ftar_core.bench.nodes import Pair
from ftar_core.bench.report import BenchError

LATE = re.compile(r" \((\d+\.\d) ms ago\)$")  # the plugin says so of a line that it could not write at once
SPOKEN = re.compile(r"\b(?:to|from) (\S+) by (rail\d+): (UP|DOWN|PROBING|HOLD|carries the data)\b")


@dataclass(frozen=True)
class Line:
    """A word of the plugin about one end of one connection on one rail."""

    ns: int
    node: int
    rail: int
    says: str
    text: str


def understood(ns: int, node: int, text: str) -> Line | None:
    """`ns`: when the line was written. None: it is about something else."""
    found, late = SPOKEN.search(text), LATE.search(text)
    if found is None:
        return None
    at = ns - int(float(late[1]) * 1e6) if late else ns
    return Line(at, node, int(found[2].removeprefix("rail")), found[3], text)


@dataclass
class Watch:
    """Collects what both nodes say, and looks after their traffic."""

    pair: Pair
    lines: list[Line] = field(default_factory=list)

    def poll(self) -> None:
        """BenchError: the traffic of a node broke."""
        for i, node in enumerate(self.pair.nodes):
            for ns, _, text in node.ask("log"):
                if line := understood(ns, i, text):
                    self.lines.append(line)
            error, _ = node.ask("state")
            if error:
                raise BenchError(f"{node.name}: {error}")

    def said(self, says: str, since_ns: int, node: int, rail: int) -> list[int]:
        """When, in order."""
        return sorted(
            line.ns
            for line in self.lines
            if line.ns >= since_ns and (line.node, line.rail, line.says) == (node, rail, says)
        )

    def forget(self) -> None:
        self.lines.clear()


@dataclass(frozen=True)
class Done:
    """One fault, from its first moment to its repair (monotonic nanoseconds, taken just before the system calls)."""

    begun_ns: int
    repaired_ns: int
    rails: tuple[int, ...]
    outage_ms: float = 0.0  # how long no rail worked


def _pause(low_s: float, high_s: float, dice: random.Random) -> None:
    time.sleep(dice.uniform(low_s, high_s))


Switch = Callable[[Network, int, int, bool], None]  # (network, node, rail, good)


def link(network: Network, node: int, rail: int, good: bool) -> None:
    network.link(node, rail, good)


def cable(network: Network, node: int, rail: int, good: bool) -> None:
    network.cable(node, rail, good)


def forward(network: Network, node: int, rail: int, good: bool) -> None:
    network.forward(node, rail, good)


@dataclass(frozen=True)
class Fault:
    what: str
    switch: Switch
    lasts_s: tuple[float, float]
    cycles: int = 1
    all_rails: bool = False

    def make(self, network: Network, dice: random.Random) -> Done:
        """Make it and take it back. What it hits is drawn from `dice`."""
        node = dice.randrange(2)
        rails = list(range(len(network.devices)))
        dice.shuffle(rails)
        hit = rails if self.all_rails else rails[:1]
        first = time.monotonic_ns()
        all_gone = first
        for cycle in range(self.cycles):
            for rail in hit:
                self.switch(network, node, rail, False)
            all_gone = time.monotonic_ns()
            _pause(*self.lasts_s, dice)
            repaired = time.monotonic_ns()
            for rail in hit:
                self.switch(network, node, rail, True)
            if cycle + 1 < self.cycles:
                _pause(*self.lasts_s, dice)
        outage = (repaired - all_gone) / 1e6 if self.all_rails else 0.0
        return Done(first, repaired, tuple(hit), outage)


FAULTS: dict[str, Fault | None] = {
    "none": None,  # the same traffic left in peace: what the machine itself does to it
    "carrier": Fault("a NIC is set down", link, (0.05, 0.15)),
    "silent": Fault("a switch drops a node's frames both ways, carrier stays up", forward, (0.3, 0.4)),
    "peer": Fault("the far end of a NIC's cable goes dark; the other node keeps its carrier", cable, (0.05, 0.15)),
    "both": Fault("all rails of a node at once, for a while", link, (0.2, 0.4), all_rails=True),
    "flap": Fault("20 quick cycles of one NIC", link, (0.002, 0.03), cycles=20),
}


def recognised_ms(watch: Watch, done: Done, ends: int) -> tuple[float | None, float | None]:
    """(when the first node knew of all its ends of connections on the rails that were hit, when both knew) after the
    fault, in milliseconds. None: not all of them said so (a rail that came back before it was missed)."""
    knew: list[float] = []
    told: list[float] = []
    for rail in done.rails:
        last = []
        for node in range(2):
            times = watch.said("DOWN", done.begun_ns, node, rail)
            if len(times) >= ends:
                last.append((times[ends - 1] - done.begun_ns) / 1e6)
        if last:
            knew.append(min(last))
        if len(last) == 2:
            told.append(max(last))
    complete = len(done.rails)
    return max(knew) if len(knew) == complete else None, max(told) if len(told) == complete else None


def longest_gap_ms(gaps: Iterable[tuple[int, int, int]], begun_ns: int, ended_ns: int) -> float:
    """The longest time that a connection stood still and that touches this window; 1 ms is the shortest that counts."""
    return max((end - begin for _, begin, end in gaps if end >= begun_ns and begin <= ended_ns), default=0) / 1e6
