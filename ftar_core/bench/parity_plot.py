"""The picture of `bench parity`: loss over tokens, the calm runs as a band; and differences of the final losses with
their confidence intervals beside the margin."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean, stdev

from ftar_core.bench import parity_plan as plan
from ftar_core.bench.parity_raw import Record
from ftar_core.bench.parity_rows import rows
from ftar_core.bench.report import Row
from ftar_core.bench.svg import STYLE, WIDTH

POINTS = 40
HEAD, TITLE, PLOT, BELOW = 40, 34, 190, 44
CURVE = (56, 452)  # from x to x
FOREST = (560, 780)
MORE_STYLE = """
.band { fill: #59636e; fill-opacity: .25 } .dot { stroke: none }
.c3 { fill: #8250df } .s3 { stroke: #8250df } .c4 { fill: #9a6700 } .s4 { stroke: #9a6700 }
@media (prefers-color-scheme: dark) {
  .c3 { fill: #ab7df8 } .s3 { stroke: #ab7df8 } .c4 { fill: #d29922 } .s4 { stroke: #d29922 } .band { fill: #9198a1 }
}
"""


def draw_parity(records: Sequence[Record], margin: float | None = None) -> str:
    """SVG text; one row of panels for each treatment of the batch."""
    batches = list(dict.fromkeys(record.case.batch for record in records))
    settings = list(dict.fromkeys(r.case.setting for r in records if r.case.setting not in (plan.CALM, plan.DRAINS)))
    colours = {setting: i % 5 for i, setting in enumerate(settings)}
    height = HEAD + len(batches) * (TITLE + PLOT + BELOW)
    title = "The same tokens, with and without a storm of failures"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}{MORE_STYLE}</style>",
        f'<text class="title" x="{CURVE[0]}" y="20">{escape(title)}</text>',
    ]
    for i, batch in enumerate(batches):
        top = HEAD + i * (TITLE + PLOT + BELOW) + TITLE
        mine = [record for record in records if record.case.batch == batch and not record.problem]
        if any(record.case.setting == plan.CALM for record in mine):
            parts += _curves(mine, colours, batch, top)
            parts += _differences(rows(mine, margin), mine, colours, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curves(records: Sequence[Record], colours: dict[str, int], batch: str, top: int) -> list[str]:
    calm = [record.curve(POINTS) for record in records if record.case.setting == plan.CALM]
    tokens = max(record.tokens for record in records)
    values = [loss for record in records for _, loss in record.curve(POINTS)[2:]]
    low, high = min(values), max(values)
    left, right = CURVE

    def x(at: float) -> float:
        return left + (right - left) * at / tokens

    def y(loss: float) -> float:
        return top + PLOT * (1 - (min(max(loss, low), high) - low) / ((high - low) or 1.0))

    parts = [f'<text x="{left}" y="{top - 10}">{escape(_words(batch))}: training loss, nats a byte</text>']
    for loss in (low, (low + high) / 2, high):
        parts.append(f'<path class="axis" d="M{left} {y(loss):.1f}H{right}"/>')
        parts.append(f'<text class="quiet" x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for share in (0.0, 0.5, 1.0):
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        text = f"{tokens * share:,.0f}" + (" tokens" if share == 1 else "")
        at = f'x="{x(tokens * share):.1f}" y="{top + PLOT + 18}"'
        parts.append(f'<text class="quiet" {at} text-anchor="{anchor}">{text}</text>')
    band = [_spread([curve[i] for curve in calm if i < len(curve)]) for i in range(max(len(c) for c in calm))]
    upper = "L".join(f"{x(at):.1f} {y(mean + sd):.1f}" for at, mean, sd in band)
    lower = "L".join(f"{x(at):.1f} {y(mean - sd):.1f}" for at, mean, sd in reversed(band))
    parts.append(f'<path class="band" d="M{upper}L{lower}Z"/>')
    for setting, colour in colours.items():
        mine = [record.curve(POINTS) for record in records if record.case.setting == setting]
        if mine:
            line = [_spread([curve[i] for curve in mine if i < len(curve)]) for i in range(max(len(c) for c in mine))]
            path = "L".join(f"{x(at):.1f} {y(mean):.1f}" for at, mean, _ in line)
            parts.append(f'<path class="s{colour} line" d="M{path}"/>')
    return [
        *parts,
        f'<text class="quiet" x="{left}" y="{top + PLOT + 34}">band: calm runs, mean and sd of the seeds</text>',
    ]


def _spread(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(tokens, mean loss, standard deviation)"""
    losses = [loss for _, loss in points]
    return fmean(at for at, _ in points), fmean(losses), stdev(losses) if len(losses) > 1 else 0.0


def _differences(made: Sequence[Row], records: Sequence[Record], colours: dict[str, int], top: int) -> list[str]:
    calm = {r.case.seed: r.held_out_loss for r in records if r.case.setting == plan.CALM}
    shown = [row for row in made if row["setting"] in colours]
    margin = next((float(row["margin"]) for row in shown if row["margin"] is not None), 0.0)
    pairs = {
        name: [r.held_out_loss - calm[r.case.seed] for r in records if r.case.setting == name and r.case.seed in calm]
        for name in colours
    }
    ends = [abs(float(row[end] or 0.0)) for row in shown for end in ("ci_low", "ci_high")]
    reach = 1.1 * max([margin, *ends, *(abs(d) for found in pairs.values() for d in found), 1e-9])
    left, right = FOREST

    def x(value: float) -> float:
        return (left + right) / 2 + (right - left) / 2 * value / reach

    parts = [
        f'<text x="{left - 72}" y="{top - 10}">held-out loss minus that of the calm run, nats</text>',
        f'<rect class="band" x="{x(-margin):.1f}" y="{top}" width="{x(margin) - x(-margin):.1f}" height="{PLOT}"/>',
        f'<path class="axis" d="M{x(0):.1f} {top}V{top + PLOT}"/>',
    ]
    for value in (-reach / 1.1, 0.0, reach / 1.1):
        at = f'x="{x(value):.1f}" y="{top + PLOT + 18}"'
        parts.append(f'<text class="quiet" {at} text-anchor="middle">{value:+.3f}</text>' if value else "")
    parts.append(
        f'<text class="quiet" x="{left}" y="{top + PLOT + 34}">band: the margin; dots: seeds; bars: 90 %</text>'
    )
    for i, row in enumerate(shown):
        name = str(row["setting"])
        y = top + PLOT * (i + 0.5) / len(shown)
        colour = colours[name]
        parts.append(f'<text x="{left - 72}" y="{y + 4:.1f}">{escape(name)}</text>')
        parts += [f'<circle class="c{colour} area" cx="{x(d):.1f}" cy="{y:.1f}" r="3.5"/>' for d in pairs[name]]
        if row["difference"] is not None:
            low, high, mean = (float(row[key] or 0.0) for key in ("ci_low", "ci_high", "difference"))
            parts.append(f'<path class="s{colour} line" d="M{x(low):.1f} {y:.1f}H{x(high):.1f}"/>')
            parts.append(f'<circle class="c{colour} dot" cx="{x(mean):.1f}" cy="{y:.1f}" r="4.5"/>')
        parts.append(f'<text class="quiet" x="{right + 8}" y="{y + 4:.1f}">{escape(str(row["verdict"])[:12])}</text>')
    return parts


def _words(batch: str) -> str:
    return {"none": "smaller updates", "global_batch": "constant global batch"}.get(batch, batch)
