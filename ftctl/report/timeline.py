"""The timeline of a run as one SVG: contributors, loss, speed over time, faults and epochs marked. Pure.

Nothing is loaded from anywhere, so that the report is one file that still opens in ten years.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ftctl.report.reading import Run

WIDTH, LEFT, RIGHT = 960, 64, 64
TOP, PLOT, LANE = 28, 170, 18
LETTER = 6.5  # pixels of a label's, about
MAX_POINTS = 800
COLOURS = {"steps": "#1f6feb", "loss": "#8250df", "contributors": "#2da44e", "fault": "#cf222e", "epoch": "#9a6700"}


@dataclass(frozen=True)
class Span:
    """An incident as it lies in time: seconds from the beginning of the run."""

    begin: float
    end: float
    label: str


def svg(run: Run) -> str:
    """Empty if the run was over before anything was seen."""
    samples = [(run.since(s), s) for s in run.of("sample")]
    if len(samples) < 2:
        return ""
    samples = samples[:: max(1, len(samples) // MAX_POINTS)]
    last = max(samples[-1][0], *(span.end for span in _spans(run)), 0.001)
    lanes = _lanes(_spans(run), LETTER * last / (WIDTH - RIGHT - LEFT))
    height = TOP + PLOT + 30 + LANE * max(1, len(lanes)) + 24
    x = _scale(0.0, last, LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline of {escape(run.name)}"'
        ' xmlns="http://www.w3.org/2000/svg" class="timeline">'
    ]
    parts += _axis(last, x)
    parts += _contributors(samples, x, last)
    speed = _speed(samples)
    parts += _line(
        speed, x, _scale(0.0, max((v for _, v in speed), default=1.0) * 1.15 or 1.0, TOP + PLOT, TOP), "steps"
    )
    losses = [(t, float(s["loss"])) for t, s in samples if s.get("loss") is not None]
    if losses:
        low, high = min(v for _, v in losses), max(v for _, v in losses)
        pad = (high - low) * 0.1 or 0.1
        parts += _line(losses, x, _scale(low - pad, high + pad, TOP + PLOT, TOP), "loss")
        parts.append(_text(WIDTH - RIGHT + 6, TOP + 10, f"{high:.2f}", COLOURS["loss"]))
        parts.append(_text(WIDTH - RIGHT + 6, TOP + PLOT, f"{low:.2f}", COLOURS["loss"]))
    if speed:
        parts.append(_text(LEFT - 8, TOP + 10, f"{max(v for _, v in speed):.1f}/s", COLOURS["steps"], "end"))
    parts += _epochs(samples, x)
    parts += _incidents(lanes, x, TOP + PLOT + 30)
    parts += _legend()
    parts.append("</svg>")
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float):  # type: ignore[no-untyped-def]
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _axis(last: float, x: object) -> list[str]:
    step = next((s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600) if last / s <= 12), 7200)
    found = []
    at = 0.0
    while at <= last:
        px = x(at)  # type: ignore[operator]
        found.append(f'<line x1="{px:.1f}" y1="{TOP}" x2="{px:.1f}" y2="{TOP + PLOT}" class="grid"/>')
        found.append(_text(px, TOP + PLOT + 14, f"{at:g} s", "var(--faint)", "middle"))
        at += step
    return found


def _contributors(samples: Sequence[tuple[float, dict[str, object]]], x: object, last: float) -> list[str]:
    """A band whose height is the number of contributors."""
    points = [(t, int(str(s["contributors"]))) for t, s in samples if s.get("contributors") is not None]
    if not points:
        return []
    most = max(count for _, count in points)
    y = _scale(0.0, most * 1.0, TOP + PLOT, TOP + PLOT * 0.55)
    path = [f"M{x(points[0][0]):.1f},{TOP + PLOT}"]  # type: ignore[operator]
    for index, (at, count) in enumerate(points):
        until = points[index + 1][0] if index + 1 < len(points) else last
        path.append(f"L{x(at):.1f},{y(count):.1f}L{x(until):.1f},{y(count):.1f}")  # type: ignore[operator]
    path.append(f"L{x(last):.1f},{TOP + PLOT}Z")  # type: ignore[operator]
    label = _text(LEFT - 8, y(most) + 4, f"{most}", COLOURS["contributors"], "end")
    return [f'<path d="{"".join(path)}" fill="{COLOURS["contributors"]}" fill-opacity="0.18"/>', label]


def _speed(samples: Sequence[tuple[float, dict[str, object]]], window_s: float = 1.5) -> list[tuple[float, float]]:
    """Steps a second, over a window that slides."""
    steps = [(t, int(str(s["step"]))) for t, s in samples if s.get("step") is not None]
    found, begin = [], 0
    for index in range(1, len(steps)):
        while begin < index - 1 and steps[index][0] - steps[begin + 1][0] >= window_s:
            begin += 1
        seconds = steps[index][0] - steps[begin][0]
        if seconds > 0:
            found.append((steps[index][0], max(0, steps[index][1] - steps[begin][1]) / seconds))
    return found


def _line(points: Sequence[tuple[float, float]], x: object, y: object, what: str) -> list[str]:
    if len(points) < 2:
        return []
    path = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in points)  # type: ignore[operator]
    return [f'<polyline points="{path}" fill="none" stroke="{COLOURS[what]}" stroke-width="1.8"/>']


def _epochs(samples: Sequence[tuple[float, dict[str, object]]], x: object) -> list[str]:
    found, before = [], None
    for at, sample in samples:
        epoch = sample.get("epoch")
        if epoch is not None and before is not None and epoch != before:
            px = x(at)  # type: ignore[operator]
            title = f"<title>epoch {escape(str(epoch))}</title>"
            line = f'<line x1="{px:.1f}" y1="{TOP}" x2="{px:.1f}" y2="{TOP + PLOT}" stroke="{COLOURS["epoch"]}"'
            found.append(f'<g>{title}{line} stroke-dasharray="3 3"/></g>')
        before = epoch if epoch is not None else before
    return found


def _spans(run: Run) -> list[Span]:
    """Each incident from its beginning to what ended it: the fault's revert, the replica's return, or at once."""
    reverted: dict[str, float] = {}
    for record in run.of("action"):
        if record.get("what") == "revert":
            for fault in record.get("faults") or []:
                reverted.setdefault(fault, run.since(record))
    for record in run.of("event"):
        event = record["event"]
        if event["kind"] == "fault.reverted":
            at = event["time"] - run.records[0]["time"]
            fault = str(event["reason"]).split(" ", 1)[0]
            reverted[fault] = min(reverted.get(fault, at), at)
    costs = {cost["incident"]: cost for cost in run.costs}
    faults = {r["incident"]: r.get("fault") for r in run.of("action") if r.get("what") == "inject"}
    spans = []
    for record in run.of("incident"):
        begin = run.since(record)
        end = begin
        if (fault := faults.get(record["number"])) and fault in reverted:
            end = max(end, reverted[fault])
        back = costs.get(record["number"], {}).get("rejoin_s")
        if back is not None:
            end = max(end, begin + float(back))
        place = (
            "/".join(part for part in (record["node"], record["nic"]) if part) if record["nic"] else record["replica"]
        )
        spans.append(Span(begin, end, f"{record['what']} {place or record['node']}".strip()))
    return spans


def _lanes(spans: Sequence[Span], letter_s: float) -> list[list[Span]]:
    """Spans that overlap lie in different lanes; a label takes room to its right, `letter_s` seconds a letter."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        for lane in lanes[:12]:
            if lane[-1].end + letter_s * (len(lane[-1].label) + 2) <= span.begin:
                lane.append(span)
                break
        else:
            if len(lanes) < 12:
                lanes.append([span])
    return lanes


def _incidents(lanes: Sequence[Sequence[Span]], x: object, top: float) -> list[str]:
    found = []
    for number, lane in enumerate(lanes):
        y = top + number * LANE
        for span in lane:
            x0, x1 = x(span.begin), x(span.end)  # type: ignore[operator]
            title = f"<title>{escape(span.label)}: {span.end - span.begin:.2f} s</title>"
            red, wide = COLOURS["fault"], max(3.0, x1 - x0)
            box = f'<rect x="{x0:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{LANE - 6}" rx="2" fill="{red}"/>'
            found.append(f"<g>{title}{box}{_text(max(x1, x0 + 3) + 4, y + 10, span.label, 'var(--text)')}</g>")
            found.append(
                f'<line x1="{x0:.1f}" y1="{TOP}" x2="{x0:.1f}" y2="{y:.1f}" stroke="{red}" stroke-opacity="0.35"/>'
            )
    return found


def _legend() -> list[str]:
    names = (
        ("steps", "steps a second"),
        ("loss", "loss"),
        ("contributors", "contributors"),
        ("epoch", "new epoch"),
        ("fault", "fault"),
    )
    found, at = [], float(LEFT)
    for key, name in names:
        found.append(f'<rect x="{at:.0f}" y="6" width="12" height="10" fill="{COLOURS[key]}"/>')
        found.append(_text(at + 16, 15, name, "var(--text)"))
        at += 34 + 7.0 * len(name)
    return found


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
