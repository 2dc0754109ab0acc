"""When a fault that comes and goes is in force: a pure function of the time since it began.

Time is cut into periods of equal length. In each the fault is in force once, for `share` of the period. Without jitter
that is at its beginning; with jitter it begins later, by a part of the pause that a generator seeded with (seed, number
of the period) draws. So any moment can be asked for without walking through those before it, two runs with one seed are
alike, and the times in force add up to what was asked for. The first period has no delay: the fault begins when it is
injected.
"""

from __future__ import annotations

import random

import msgspec


class Rhythm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`share` of a period in force, `jitter` of the pause by which it may come later; both 0 to 1."""

    period_s: float
    share: float
    jitter: float = 0.0
    seed: int = 0


class Phase(msgspec.Struct, frozen=True):
    """At a moment: in force or not, and for how long that stays so."""

    on: bool
    left_s: float


def phase(rhythm: Rhythm, since_s: float) -> Phase:
    number = int(max(0.0, since_s) / rhythm.period_s)
    into_s = max(0.0, since_s) - number * rhythm.period_s
    begin_s = _delay_s(rhythm, number)
    end_s = begin_s + rhythm.period_s * rhythm.share
    if into_s < begin_s:
        return Phase(False, begin_s - into_s)
    if into_s < end_s:
        return Phase(True, end_s - into_s)
    return Phase(False, rhythm.period_s - into_s + _delay_s(rhythm, number + 1))


def _delay_s(rhythm: Rhythm, number: int) -> float:
    if number == 0 or rhythm.jitter <= 0:
        return 0.0
    pause_s = rhythm.period_s * (1.0 - rhythm.share)
    return pause_s * rhythm.jitter * random.Random(f"{rhythm.seed}/{number}").random()
