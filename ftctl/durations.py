"""Durations as people write and read them: 500ms, 20s, 2m, 1h, 1h30m. A bare number is refused: seconds or minutes?"""

from __future__ import annotations

import re

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_WHOLE = re.compile(rf"(?:{_PIECE.pattern})+\Z", re.ASCII)


class DurationError(ValueError):
    """The text is not a duration; the message says what is expected."""


def parse(text: str) -> float:
    """Seconds, >= 0. Raises DurationError."""
    stripped = text.strip()
    if len(stripped) > 64 or not _WHOLE.match(stripped):
        raise DurationError(f"{text[:64]!r} is not a duration (write 500ms, 20s, 2m or 1h30m)")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PIECE.findall(stripped))


def show(seconds: float) -> str:
    """A short text in the two largest units that matter: 0.25 -> 250ms, 20.04 -> 20s, 3725 -> 1h2m."""
    if seconds < 0:
        return "-" + show(-seconds)
    if seconds < 0.9995:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for size, unit, lower_size, lower_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // lower_size
            return f"{whole // size}{unit}" + (f"{rest}{lower_unit}" if rest else "")
    return f"{whole}s"
