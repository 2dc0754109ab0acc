"""A picture of something over time, as SVG text: areas coloured by who carried it, and marks with words. It follows the
reader's light or dark theme, and needs no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Scale = Callable[[float], float]
WIDTH, LEFT, RIGHT = 860, 56, 16
HEAD, TITLE, PLOT, BELOW = (
    36,
    46,
    130,
    46,
)  # heights: of the picture's title, a panel's title, its plot, the words below

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 }
.quiet { fill: #59636e }
.axis { stroke: #d1d9e0; stroke-width: 1 }
.mark { stroke: #59636e; stroke-width: 1; stroke-dasharray: 3 3 }
.bad { stroke: #cf222e; stroke-dasharray: none }
.c0 { fill: #0969da } .c1 { fill: #bc4c00 } .c2 { fill: #1a7f37 }
.area { fill-opacity: .30 } .line { fill: none; stroke-width: 1.5; stroke-linejoin: round }
.s0 { stroke: #0969da } .s1 { stroke: #bc4c00 } .s2 { stroke: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .quiet { fill: #9198a1 } .axis { stroke: #3d444d } .mark { stroke: #9198a1 }
  .bad { stroke: #f85149 }
  .c0 { fill: #4493f8 } .c1 { fill: #f0883e } .c2 { fill: #3fb950 }
  .s0 { stroke: #4493f8 } .s1 { stroke: #f0883e } .s2 { stroke: #3fb950 }
}
"""


@dataclass(frozen=True)
class Mark:
    at_ms: float
    text: str


@dataclass(frozen=True)
class Span:
    """Who carried the traffic."""

    from_ms: float
    to_ms: float
    name: str
    colour: int  # 0..2


@dataclass(frozen=True)
class Panel:
    title: str
    values: Sequence[float]  # one a bin
    bin_ms: float
    top: float  # of the axis
    unit: str
    spans: Sequence[Span]
    marks: Sequence[Mark]  # in order; the first is the failure


def draw(title: str, panels: Sequence[Panel]) -> str:
    height = HEAD + len(panels) * (TITLE + PLOT + BELOW)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    for i, one in enumerate(panels):
        parts += _panel(one, HEAD + i * (TITLE + PLOT + BELOW) + TITLE)
    names = sorted({(s.colour, s.name) for one in panels for s in one.spans})
    x = WIDTH - RIGHT - 76 * len(names)
    for colour, name in names:
        parts.append(f'<rect class="c{colour} area" x="{x}" y="10" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="quiet" x="{x + 18}" y="20">{escape(name)}</text>')
        x += 76
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(one: Panel, top: int) -> list[str]:
    bottom = top + PLOT
    duration = len(one.values) * one.bin_ms
    wide = WIDTH - LEFT - RIGHT

    def x(ms: float) -> float:
        return LEFT + wide * ms / duration

    def y(value: float) -> float:
        return bottom - (bottom - top) * min(value, one.top) / one.top

    parts = [f'<text x="{LEFT}" y="{top - 26}">{escape(one.title)}</text>']
    for value in (0.0, 0.5, 1.0):
        parts.append(f'<path class="axis" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{top - 8}" text-anchor="end">{escape(one.unit)}</text>')
    for ms in range(0, int(duration) + 1, 100):
        place = "end" if ms + 100 > duration else "middle"
        text = f"{ms}" if ms else "0 ms"
        parts.append(f'<text class="quiet" x="{x(ms):.1f}" y="{bottom + 16}" text-anchor="{place}">{text}</text>')
    for span in one.spans:
        steps = _steps(one, span, x, y)
        if steps:
            first, last = x(max(0.0, span.from_ms)), x(min(duration, span.to_ms))
            outline = f"M{first:.1f} {steps[0][1]:.1f}" + "".join(f"L{a:.1f} {b:.1f}" for a, b in steps)
            parts.append(f'<path class="c{span.colour} area" d="{outline}L{last:.1f} {bottom}L{first:.1f} {bottom}Z"/>')
            parts.append(f'<path class="s{span.colour} line" d="{outline}"/>')
    for k, mark in enumerate(one.marks):
        at = x(mark.at_ms)
        kind = "mark" if k else "mark bad"
        if k % 2:  # what the link does about it, below; what befalls it, above
            parts.append(f'<path class="{kind}" d="M{at:.1f} {top}V{bottom + 32}"/>')
            parts.append(f'<text x="{at + 4:.1f}" y="{bottom + 32}">{escape(mark.text)}</text>')
        else:
            parts.append(f'<path class="{kind}" d="M{at:.1f} {top - 6}V{bottom}"/>')
            parts.append(f'<text x="{at:.1f}" y="{top - 10}" text-anchor="middle">{escape(mark.text)}</text>')
    return parts


def _steps(one: Panel, span: Span, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """The curve within the span, through the middles of its bins."""
    inside = [
        (ms, value) for i, value in enumerate(one.values) if span.from_ms <= (ms := (i + 0.5) * one.bin_ms) < span.to_ms
    ]
    if not inside:
        return []
    points = [(x(max(0.0, span.from_ms)), y(inside[0][1]))]
    points += [(x(ms), y(value)) for ms, value in inside]
    points.append((x(min(len(one.values) * one.bin_ms, span.to_ms)), y(inside[-1][1])))
    return points
