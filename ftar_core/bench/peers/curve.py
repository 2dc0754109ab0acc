"""Effective training time over the mean time between failures: the model, and its picture. Pure.

The model is the one of FT-HSDP (arXiv 2602.00277): 1 - (stall + stall at rejoin) / MTBF - degraded time / (replicas x
MTBF), and 1 - recovery / MTBF for a synchronous job, whose recovery is one stall of all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ftar_core.bench.svg import STYLE

RATIO = 1.8  # MTBF over the restart time of the synchronous job: 18 and 10 minutes in the paper
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 860, 400, 56, 130, 40, 56
POINTS = 120
COLOURS = """
.c3 { fill: #8250df } .c4 { fill: #bf3989 } .s3 { stroke: #8250df } .s4 { stroke: #bf3989 }
@media (prefers-color-scheme: dark) {
  .c3 { fill: #ab7df8 } .c4 { fill: #db61a2 } .s3 { stroke: #ab7df8 } .s4 { stroke: #db61a2 }
}
"""
DECADE = (1, 2, 5)


@dataclass(frozen=True)
class Losses:
    """Of one incident, on average; seconds."""

    stall: float
    rejoin: float
    degraded: float  # with a replica missing
    synchronous: bool = False


@dataclass(frozen=True)
class Curve:
    name: str
    losses: Losses
    measured: Sequence[tuple[float, float]] = ()  # (MTBF, effective training time) of runs


def effective_time(losses: Losses, mtbf_s: float, replicas: int) -> float:
    """0..1."""
    lost = losses.stall / mtbf_s
    if not losses.synchronous:
        lost += losses.rejoin / mtbf_s + losses.degraded / (replicas * mtbf_s)
    return max(0.0, 1.0 - lost)


def bound(degraded_s: float, mtbf_s: float, replicas: int) -> float:
    """What is left when nothing is lost but the missing replica's own work."""
    return max(0.0, 1.0 - degraded_s / (replicas * mtbf_s))


def draw(title: str, curves: Sequence[Curve], replicas: int, mark_s: float | None) -> str:
    """SVG text. `mark_s`: an MTBF to mark, with the paper's ratio."""
    points = [m for curve in curves for m, _ in curve.measured]
    low = min([*points, *([mark_s] if mark_s else []), 10.0]) / 1.5
    high = max([*points, 1000.0])
    tall, wide = HEIGHT - TOP - BELOW, WIDTH - LEFT - RIGHT

    def x(mtbf_s: float) -> float:
        return LEFT + wide * math.log(mtbf_s / low) / math.log(high / low)

    def y(share: float) -> float:
        return TOP + tall * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}{COLOURS}</style>",
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path class="axis" d="M{LEFT} {y(share):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="quiet" x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share * 100:.0f} %</text>'
        )
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in DECADE:
            mtbf_s = digit * 10.0**exponent
            if low <= mtbf_s <= high:
                parts.append(f'<path class="axis" d="M{x(mtbf_s):.1f} {TOP}V{HEIGHT - BELOW}"/>')
                parts.append(
                    f'<text class="quiet" x="{x(mtbf_s):.1f}" y="{HEIGHT - BELOW + 16}" text-anchor="middle">'
                    f"{mtbf_s:g} s</text>"
                )
    parts.append(
        f'<text class="quiet" x="{LEFT + wide / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">mean time between'
        " failures (curves: the model with measured losses; dots: measured directly)</text>"
    )
    if mark_s is not None:
        parts.append(f'<path class="mark" d="M{x(mark_s):.1f} {TOP - 6}V{HEIGHT - BELOW}"/>')
        parts.append(f'<text class="quiet" x="{x(mark_s) + 4:.1f}" y="{TOP - 2}">{RATIO:g} x restart</text>')
    for k, curve in enumerate(curves):
        line = []
        for i in range(POINTS + 1):
            mtbf_s = low * (high / low) ** (i / POINTS)
            line.append(f"{x(mtbf_s):.1f} {y(effective_time(curve.losses, mtbf_s, replicas)):.1f}")
        colour = k % 5
        parts.append(f'<path class="s{colour} line" d="M{"L".join(line)}"/>')
        for mtbf_s, share in curve.measured:
            parts.append(f'<circle class="c{colour}" cx="{x(mtbf_s):.1f}" cy="{y(share):.1f}" r="4"/>')
        at = TOP + 14 + 18 * k
        parts.append(f'<rect class="c{colour}" x="{WIDTH - RIGHT + 12}" y="{at - 9}" width="10" height="10" rx="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 28}" y="{at}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
