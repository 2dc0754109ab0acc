"""The timeline of a run as one SVG: contributors, loss, speed over time, epochs and faults marked, and what became of
each replica. Pure.

Nothing is loaded from anywhere, so that the report is one file that still opens in ten years. Colours are those of the
page (report.html.j2), which has them for light and for dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ftctl.report.reading import Run

WIDTH, LEFT, RIGHT = 960, 64, 64
TOP, PLOT, LANE, ROW = 28, 170, 18, 15
LETTER = 6.5  # pixels of a label's, about
MAX_POINTS = 800
MAX_REPLICAS = 8  # with a row of their own
MAX_LANES = 12
Samples = Sequence[tuple[float, dict[str, Any]]]
Scale = Callable[[float], float]
COLOURS = {name: f"var(--{name})" for name in ("steps", "loss", "contributors", "fault", "epoch")}
# What a replica does -> class of the page: it trains, could train, comes, is in trouble, is out.
STATES = {
    "contributing": "good",
    "spare": "spare",
    "starting": "coming",
    "fetching": "coming",
    "replaying": "coming",
    "suspect": "warn",
    "hung": "warn",
    "blocked": "warn",
    "draining": "warn",
    "drained": "out",
    "evicted": "bad",
    "unreachable": "bad",
}


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
    lanes = _lanes(_spans(run), LETTER * last / (WIDTH - RIGHT - LEFT), last)
    replicas = _replicas(samples)
    below = TOP + PLOT + 26
    height = below + LANE * len(lanes) + (ROW * len(replicas) + 8 if replicas else 0)
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
        parts.append(_text(LEFT - 8, TOP + PLOT, "0", COLOURS["steps"], "end"))
    parts += _epochs(samples, x)
    parts += _incidents(lanes, x, below)
    parts += _rows(replicas, samples, x, last, below + LANE * len(lanes) + 8)
    parts += _legend()
    parts.append("</svg>")
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _axis(last: float, x: Scale) -> list[str]:
    step = next((s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600) if last / s <= 12), last / 10)
    found = []
    at = 0.0
    while at <= last:
        px = x(at)
        found.append(f'<line x1="{px:.1f}" y1="{TOP}" x2="{px:.1f}" y2="{TOP + PLOT}" class="grid"/>')
        found.append(_text(px, TOP + PLOT + 14, f"{at:g} s", "var(--faint)", "middle"))
        at += step
    found.append(
        f'<line x1="{LEFT}" y1="{TOP + PLOT}" x2="{WIDTH - RIGHT}" y2="{TOP + PLOT}" class="grid" stroke-width="1"/>'
    )
    return found


def _contributors(samples: Samples, x: Scale, last: float) -> list[str]:
    """A band whose height is the number of contributors."""
    points = [(t, int(str(s["contributors"]))) for t, s in samples if s.get("contributors") is not None]
    if not points:
        return []
    most = max(count for _, count in points)
    y = _scale(0.0, most * 1.0, TOP + PLOT, TOP + PLOT * 0.55)
    path = [f"M{x(points[0][0]):.1f},{TOP + PLOT}"]
    for index, (at, count) in enumerate(points):
        until = points[index + 1][0] if index + 1 < len(points) else last
        path.append(f"L{x(at):.1f},{y(count):.1f}L{x(until):.1f},{y(count):.1f}")
    path.append(f"L{x(last):.1f},{TOP + PLOT}Z")
    label = _text(LEFT - 8, y(most) + 4, f"{most}", COLOURS["contributors"], "end")
    return [f'<path d="{"".join(path)}" fill="{COLOURS["contributors"]}" fill-opacity="0.18"/>', label]


def _speed(samples: Samples, window_s: float = 1.5) -> list[tuple[float, float]]:
    """Steps a second, over a window that slides."""
    steps = _without_dips([(t, int(str(s["step"]))) for t, s in samples if s.get("step") is not None])
    found, begin = [], 0
    for index in range(1, len(steps)):
        while begin < index - 1 and steps[index][0] - steps[begin + 1][0] >= window_s:
            begin += 1
        seconds = steps[index][0] - steps[begin][0]
        if seconds >= window_s / 2:  # over less it is whether one step fell into it
            found.append((steps[index][0], max(0, steps[index][1] - steps[begin][1]) / seconds))
    return found


def _without_dips(steps: Sequence[tuple[float, int]], short_s: float = 5.0) -> list[tuple[float, int]]:
    """A coordinator that has just begun again does not know the step yet; what it then says is no step of the job's."""
    found: list[tuple[float, int]] = []
    for index, (at, step) in enumerate(steps):
        back = found and step < found[-1][1]
        if back and any(later >= found[-1][1] for when, later in steps[index + 1 :] if when - at <= short_s):
            continue
        found.append((at, step))
    return found


def _line(points: Sequence[tuple[float, float]], x: Scale, y: Scale, what: str) -> list[str]:
    if len(points) < 2:
        return []
    path = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{COLOURS[what]}" stroke-width="1.8" stroke-linejoin="round"/>'
    ]


def _epochs(samples: Samples, x: Scale) -> list[str]:
    found, before = [], None
    for at, sample in samples:
        epoch = sample.get("epoch")
        if epoch is not None and before is not None and epoch != before:
            px = x(at)
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
    over = run.since(run.records[-1])  # events are dated by their nodes, whose clocks may be minutes from this one's
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
        spans.append(Span(begin, min(end, max(over, begin)), f"{record['what']} {place or record['node']}".strip()))
    return spans


def _lanes(spans: Sequence[Span], letter_s: float, last: float) -> list[list[Span]]:
    """Spans that overlap lie in different lanes; a label takes room beside its span, `letter_s` seconds a letter."""
    lanes: list[list[Span]] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: span.begin):
        room = letter_s * (len(span.label) + 2)
        left = span.end + room > last
        begin, end = (max(0.0, span.begin - room), span.end) if left else (span.begin, span.end + room)
        for number, taken in enumerate(ends[:MAX_LANES]):
            if taken <= begin:
                lanes[number].append(span)
                ends[number] = end
                break
        else:
            if len(lanes) < MAX_LANES:
                lanes.append([span])
                ends.append(end)
    return lanes


def _incidents(lanes: Sequence[Sequence[Span]], x: Scale, top: float) -> list[str]:
    found = []
    for number, lane in enumerate(lanes):
        y = top + number * LANE
        for span in lane:
            x0, x1 = x(span.begin), x(span.end)
            title = f"<title>{escape(span.label)}: {span.end - span.begin:.2f} s</title>"
            red, wide = COLOURS["fault"], max(3.0, x1 - x0)
            box = f'<rect x="{x0:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{LANE - 6}" rx="2" fill="{red}"/>'
            right = x0 + wide + 5
            if right + LETTER * len(span.label) > WIDTH - RIGHT:
                label = _text(x0 - 5, y + 10, span.label, "var(--text)", "end")
            else:
                label = _text(right, y + 10, span.label, "var(--text)")
            found.append(f"<g>{title}{box}{label}</g>")
            found.append(
                f'<line x1="{x0:.1f}" y1="{TOP}" x2="{x0:.1f}" y2="{y:.1f}" stroke="{red}" stroke-opacity="0.35"/>'
            )
    return found


def _replicas(samples: Samples) -> list[str]:
    """Those with a row of their own; none where they are too many to be read."""
    names = sorted({name for _, s in samples for name in s.get("replicas") or {}}, key=lambda name: (len(name), name))
    return names if len(names) <= MAX_REPLICAS else []


def _rows(names: Sequence[str], samples: Samples, x: Scale, last: float, top: float) -> list[str]:
    """A row a replica, in the colours of what it does."""
    found = []
    for number, name in enumerate(names):
        y = top + number * ROW
        found.append(_text(LEFT - 8, y + 9, name[:9], "var(--faint)", "end"))
        for begin, end, state in _stretches(name, samples, last):
            title = f"<title>{escape(name)} {escape(state)}: {end - begin:.1f} s</title>"
            colour = f"var(--{STATES.get(state, 'out')})"
            box = f'<rect x="{x(begin):.1f}" y="{y}" width="{max(1.0, x(end) - x(begin)):.1f}" height="{ROW - 4}"'
            found.append(f'<g class="state">{title}{box} fill="{colour}"/></g>')
            if state != "contributing" and x(end) - x(begin) > LETTER * len(state) + 6:
                found.append(_text((x(begin) + x(end)) / 2, y + 9, state, "#fff", "middle"))
    return found


def _stretches(name: str, samples: Samples, last: float) -> list[tuple[float, float, str]]:
    """(begin, end, state): how long the replica was in which state."""
    found: list[tuple[float, float, str]] = []
    for index, (at, sample) in enumerate(samples):
        state = (sample.get("replicas") or {}).get(name)
        if state is None:
            continue
        end = samples[index + 1][0] if index + 1 < len(samples) else last
        if found and found[-1][2] == state and found[-1][1] == at:
            found[-1] = (found[-1][0], end, state)
        else:
            found.append((at, end, str(state)))
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
        found.append(f'<rect x="{at:.0f}" y="6" width="12" height="10" rx="3" fill="{COLOURS[key]}"/>')
        found.append(_text(at + 17, 15, name, "var(--text)"))
        at += 36 + LETTER * len(name)
    return found


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
