"""Prometheus' text format, as much of it as agents write (prometheus.io/docs/instrumenting/exposition_formats).

    ftctl_nic_carrier{nic="rail0",role="rail"} 1.0

A line that is none is passed by: an agent of another version may say more than is understood here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*\Z")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|\Z)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}


@dataclass(frozen=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    found = []
    for line in text.split("\n"):
        if line.startswith("#") or not (match := _LINE.match(line)):
            continue
        name, inside, number = match.groups()
        labels = _labels(inside or "")
        try:
            value = float(number)
        except ValueError:
            continue
        if labels is not None:
            found.append(Sample(name, labels, value))
    return found


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        labels[match[1]] = _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[0]), match[2])
        at = match.end()
    return labels
