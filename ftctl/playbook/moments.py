"""Moments of the clock, as a playbook names them: `2026-12-01T14:30:00Z`, or `+90s` from where the method began."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ftctl import durations

LATE_S = 1.0  # a moment that is over by no more than this is now


@dataclass(frozen=True)
class Moment:
    """`unix`: seconds since 1970, or None; `after`: seconds since the method began (each round of it), or None."""

    unix: float | None = None
    after: float | None = None

    def __str__(self) -> str:
        if self.unix is None:
            return f"+{durations.show(self.after or 0.0)}"
        return datetime.fromtimestamp(self.unix, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def left(self, *, began: float, now: float) -> float:
        """Seconds until then, below 0 when it is over. `now`: Unix seconds; with `after`, of the clock of `began`."""
        return (self.unix if self.unix is not None else began + (self.after or 0.0)) - now


def parse(value: Any) -> Moment:
    """Raises ValueError. `value` as YAML gave it: a text, or a time that it has understood as one."""
    if isinstance(value, str) and value.startswith("+"):
        return Moment(after=durations.parse(value[1:]))
    if isinstance(value, str):
        text = value.strip()
        try:  # Python 3.10 knows no Z
            value = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        except ValueError:
            raise ValueError(
                f"{value[:64]!r} is no time (write 2026-12-01T14:30:00Z, or +90s from the beginning of the method)"
            ) from None
    if not isinstance(value, datetime):
        raise ValueError(f"{value} is no time (write 2026-12-01T14:30:00Z, or +90s from the beginning of the method)")
    if value.tzinfo is None:
        # Some versions of ruamel.yaml give UTC, and the zone beside it.
        if not (getattr(value, "_yaml", None) or {}).get("tz"):
            raise ValueError(f"{value.isoformat()}: in which time zone? (write 2026-12-01T14:30:00Z or ...+02:00)")
        value = value.replace(tzinfo=timezone.utc)
    return Moment(unix=value.timestamp())
