"""What a port did over the last day: carriers it lost, times it was away, how often it was bad. Pure; time is a number.

A cable that is pulled once is an event; one that loses contact every few hours is a defect that no look at the present
shows, so the past of each port is kept, over restarts of the agent too, and what it adds up to holds until somebody has
seen to it: a flapping port looks well most of the time.
"""

from __future__ import annotations

import msgspec

from agents.monitors.portlimits import DAY_S, MAX_KEPT, FlapLimits


class PortPast(msgspec.Struct):
    """Times in seconds of one clock. `was_up`: at some time; `down_since` None: it is up, or was never up. `lost`:
    carriers; `back`: ends of long absences; `bad`: when it became so. `flaps` says why it counts as flapping, if it
    does."""

    was_up: bool = False
    down_since: float | None = None
    lost: list[float] = []
    back: list[float] = []
    bad: list[float] = []
    is_bad: bool = False
    flaps: str = ""

    def saw(self, now: float, *, up: bool, lost: int, limits: FlapLimits) -> None:
        """How it is now, and how often it lost its carrier since the last look."""
        if up:
            if self.down_since is not None and now - self.down_since >= limits.absence_s:
                self.back.append(now)
            self.was_up, self.down_since = True, None
        elif self.was_up and self.down_since is None:
            self.down_since = now
        self.lost += [now] * min(lost, MAX_KEPT)
        self._forget(now, limits)
        if up and not self.flaps:  # while it is down, that is worse, and one fault is told once
            self.flaps = self._why(limits)

    def excused(self) -> None:
        """What it does now is the doing of an injected fault."""
        self.down_since, self.is_bad = None, False

    def judged(self, now: float, *, bad: bool) -> None:
        if bad and not self.is_bad:
            self.bad = [*self.bad, now][-MAX_KEPT:]
        self.is_bad = bad

    def wants_repair(self, now: float, limits: FlapLimits) -> str:
        """Why; empty: it does not."""
        times = sum(now - at <= limits.repair_within_s for at in self.bad)
        if times < limits.repair_times:
            return ""
        return f"bad {times} times within {hours(limits.repair_within_s)}: have it repaired"

    def clear(self) -> bool:
        """An operator has seen to it. Whether it counted as flapping."""
        flapped = bool(self.flaps)
        self.lost, self.back, self.bad, self.flaps, self.is_bad = [], [], [], "", False
        return flapped

    def shifted(self, by_s: float) -> PortPast:
        """The same, by a clock that is ahead by so much."""
        down_since = None if self.down_since is None else self.down_since + by_s
        lost, back, bad = ([at + by_s for at in times[-MAX_KEPT:]] for times in (self.lost, self.back, self.bad))
        return PortPast(self.was_up, down_since, lost, back, bad, self.is_bad, self.flaps[:200])

    def _forget(self, now: float, limits: FlapLimits) -> None:
        self.lost = [at for at in self.lost if now - at <= limits.window_s][-MAX_KEPT:]
        self.back = [at for at in self.back if now - at <= limits.window_s][-MAX_KEPT:]
        self.bad = [at for at in self.bad if now - at <= limits.repair_within_s]
        quiet_s = limits.clears_after_s
        if self.flaps and quiet_s is not None and all(now - at > quiet_s for at in (*self.lost, *self.back)):
            self.lost, self.back, self.flaps = [], [], ""

    def _why(self, limits: FlapLimits) -> str:
        if len(self.lost) >= limits.losses:
            return f"lost its carrier {len(self.lost)} times within {hours(limits.window_s)}"
        if len(self.back) >= limits.absences:
            away = f"down for {limits.absence_s:g} s or longer, and back"
            return f"{away}, {len(self.back)} times within {hours(limits.window_s)}"
        return ""


def carriers_lost(was_up: bool, changes: int) -> int:
    """From the changes of a carrier since it was up or not: every second one, beginning with a loss if it was up."""
    return max(0, changes + was_up) // 2


def hours(seconds: float) -> str:
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:g} days"
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
