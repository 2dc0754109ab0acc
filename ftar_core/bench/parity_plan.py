"""What befalls a run of `bench parity`: pure functions of a seed and of committed steps, so that a slow machine changes
nothing.

Nobody gives orders at the moment of a failure. Every replica knows the plan, and all know who contributed to the step
before, which is a committed fact; so each of them decides alike whether it is a victim at this step, and if so where in
the step it dies (breakpoints, wire/breakpoints.py). The last one in the order of victims never dies: a storm that took
everybody with it would measure the restart from a checkpoint, which is another matter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Where in its step a victim is killed: with gradients half computed, half reduced, reduced, told, committed, applied.
POINTS = ("backward", "bucket", "reduced", "done-sent", "commit-received", "update")
CALM, DRAINS = "calm", "drains"
FORM = re.compile(r"(\d{1,6})/(\d{1,6})/(\d{1,3})")


@dataclass(frozen=True)
class Storm:
    """`every` so many steps, give or take a quarter, `down` replicas are killed at one step, and each is started again
    when `out` steps are committed without it."""

    name: str
    every: int
    out: int
    down: int

    def says(self) -> str:
        who = "1 replica" if self.down == 1 else f"{self.down} replicas"
        return f"{who} every {self.every} steps, away for {self.out}"


# The name says what is more than in `some`.
STORMS = {
    storm.name: storm
    for storm in (
        Storm("some", every=60, out=20, down=1),
        Storm("often", every=25, out=8, down=1),
        Storm("long", every=100, out=60, down=1),
        Storm("many", every=60, out=20, down=2),
    )
}


def parse_storm(text: str) -> Storm:
    """A name of STORMS, or EVERY/OUT/DOWN. ValueError says what is expected."""
    if text in STORMS:
        return STORMS[text]
    match = FORM.fullmatch(text)
    if match is None:
        known = ", ".join((CALM, DRAINS, *STORMS))
        raise ValueError(
            f"{text!r}: one of {known}, or steps between failures/steps away/replicas down, such as 60/20/1"
        )
    every, out, down = (int(part) for part in match.groups())
    if every < 4 or out < 2 or down < 1:
        raise ValueError(f"{text!r}: at least 4 steps between failures, 2 steps away and 1 replica down")
    return Storm(text, every, out, down)


@dataclass(frozen=True)
class Strike:
    """One failure of a storm. `order`: of all replicas; the first that contribute are hit. `points`: where each of
    those dies."""

    step: int
    order: tuple[str, ...]
    points: tuple[str, ...]
    down: int

    def hits(self, contributors: Sequence[str]) -> dict[str, str]:
        """Victims among those who contributed to the step before, and the point at which each dies."""
        there = [name for name in self.order if name in contributors]
        return dict(zip(there[: min(self.down, len(there) - 1)], self.points, strict=False))


def strikes(storm: Storm, replicas: Sequence[str], seed: int) -> Iterator[Strike]:
    """The failures of one run, without end, in the order of their steps."""
    dice = random.Random(f"{storm.name} {seed}")
    step = 0
    while True:
        step += max(2, round(storm.every * dice.uniform(0.75, 1.25)))
        order = dice.sample(list(replicas), len(replicas))
        yield Strike(step, tuple(order), tuple(dice.choices(POINTS, k=storm.down)), storm.down)


class Fate:
    """What the plan has in store, asked for by one life of a replica at each step that it works on, in their order."""

    def __init__(self, plan: Iterator[Strike]) -> None:
        self._plan = plan
        self._next: Strike | None = next(plan, None)
        self._seen = 0  # the last step asked for; 0: none by this life

    def at(self, step: int, contributors: Sequence[str]) -> dict[str, str]:
        """Who dies in this step, and at which point. `contributors`: to the step before. A replica without a batch at
        the step of a strike asks later, and dies then; a strike from before its life is none of its business."""
        first, self._seen = self._seen == 0, step
        found: dict[str, str] = {}
        while self._next is not None and self._next.step <= step:
            strike, self._next = self._next, next(self._plan, None)
            if not first or strike.step == step:
                found = strike.hits(contributors) | found
        return found


def drain_steps(replicas: Sequence[str], seed: int, every: int) -> Iterator[tuple[int, int]]:
    """(step, which of the contributors then is drained), without end."""
    dice = random.Random(f"{DRAINS} {seed}")
    step = 0
    while True:
        step += max(2, round(every * dice.uniform(0.75, 1.25)))
        yield step, dice.randrange(len(replicas))
