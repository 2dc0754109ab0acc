"""What an incident cost, from the replicas' journals. Pure: numbers in, numbers out.

Stall of a step = (commit - last survivor's gradient produced) minus the median of that over 20 calm steps: the time for
which everybody was ready and nothing happened, less what a step's reduction takes anyway. Clocks of one machine are one
clock, so the latest gradient and the latest commit of all survivors are compared directly.

A step is calm if nobody had to reduce it again and the membership is that of the step before.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ftctl.lab.journal import Journals, Line

CALM_STEPS = 20
MIN_CALM_STEPS = 5  # a median of fewer is chance


class NotEnough(Exception):
    """The journals do not hold what is needed; the message says what is missing."""


@dataclass(frozen=True)
class Step:
    """A step as its survivors saw it. Times in seconds of the machine's monotonic clock."""

    number: int
    produced: float  # the last survivor's last gradient
    committed: float  # the last survivor's commit
    retried: bool
    contributors: tuple[str, ...]

    @property
    def wait_s(self) -> float:
        return self.committed - self.produced


@dataclass(frozen=True)
class Calm:
    """What is usual: medians over the last calm steps before an incident."""

    wait_s: float
    length_s: float  # from commit to commit
    steps: int


@dataclass(frozen=True)
class Worst:
    """The worst step of a window, by how much it exceeds what is usual; 0 or more."""

    excess_ms: float
    step: int | None


def step_lines(journals: Journals, replica: str) -> list[Line]:
    """Steps that the replica waited for; not those that it replayed as a shadow, which wait for nobody."""
    return [line for line in journals[replica].of_kind("step") if line.t_commit is not None]


def steps_of(journals: Journals, survivors: Sequence[str]) -> list[Step]:
    """The steps that all of `survivors` contributed to and committed, ascending."""
    per_replica = [_by_number(step_lines(journals, replica), replica) for replica in survivors]
    if not per_replica:
        return []
    common = set(per_replica[0]).intersection(*per_replica[1:])
    steps = []
    for number in sorted(common):
        lines = [lines[number] for lines in per_replica]
        produced = [line.t_produced for line in lines if line.t_produced is not None]
        committed = [line.t_commit for line in lines if line.t_commit is not None]
        if len(produced) == len(committed) == len(lines):
            steps.append(
                Step(number, max(produced), max(committed), any(line.retries for line in lines), lines[0].contributors)
            )
    return steps


def _by_number(lines: Iterable[Line], replica: str) -> dict[int, Line]:
    """Steps to which the replica contributed; the last line of a step, if it was committed in two lives."""
    return {line.step: line for line in lines if replica in line.contributors}


def calm_before(steps: Sequence[Step], before: float) -> Calm:
    """Medians over the last 20 calm steps committed before this time. Raises NotEnough."""
    waits: list[float] = []
    lengths: list[float] = []
    for previous, step in pairwise(steps):
        successive = step.number == previous.number + 1 and step.contributors == previous.contributors
        if successive and not step.retried and not previous.retried and step.committed < before:
            waits.append(step.wait_s)
            lengths.append(step.committed - previous.committed)
    if len(waits) < MIN_CALM_STEPS:
        raise NotEnough(
            f"only {len(waits)} calm steps before the incident, {MIN_CALM_STEPS} are needed to compare with"
        )
    return Calm(
        statistics.median(waits[-CALM_STEPS:]), statistics.median(lengths[-CALM_STEPS:]), min(len(waits), CALM_STEPS)
    )


def in_window(steps: Sequence[Step], start: float, end: float) -> list[Step]:
    """Steps that were under way in the window: committed after its start, gradients ready before its end."""
    return [step for step in steps if step.committed > start and step.produced < end]


def worst_stall(steps: Sequence[Step], calm: Calm, start: float, end: float) -> Worst:
    """The longest stall of the window. Raises NotEnough if no step was committed in it."""
    return _worst([(step, step.wait_s - calm.wait_s) for step in in_window(steps, start, end)])


def longest_step(steps: Sequence[Step], calm: Calm, start: float, end: float) -> Worst:
    """How much longer than usual the longest step of the window was, from commit to commit. Raises NotEnough."""
    wanted = {step.number for step in in_window(steps, start, end)}
    lengths = [
        (step, step.committed - previous.committed - calm.length_s)
        for previous, step in pairwise(steps)
        if step.number in wanted and step.number == previous.number + 1
    ]
    return _worst(lengths)


def _worst(excesses: Sequence[tuple[Step, float]]) -> Worst:
    if not excesses:
        raise NotEnough("no step was committed during the incident")
    step, excess_s = max(excesses, key=lambda pair: pair[1])
    return Worst(max(0.0, excess_s) * 1000.0, step.number)


def steps_lost(journals: Journals, survivors: Sequence[str], start: float, end: float) -> int:
    """Steps that a survivor had to do again, or never committed, in the window; 0: nothing of its work was thrown away.

    A step whose reduction was retried is not lost: its gradients were used. Nor is one that others committed while the
    replica was out of the membership, and which it then replays.
    """
    lost = 0
    for replica in survivors:
        lines = [line for line in step_lines(journals, replica) if start < (line.t_commit or 0.0) <= end]
        numbers = [line.step for line in lines]
        if not numbers:
            continue
        repeated = len(numbers) - len(set(numbers))
        missing = set(range(min(numbers), max(numbers) + 1)) - set(numbers)
        if missing:
            missing -= _without(journals, replica)
        lost = max(lost, repeated + len(missing))
    return lost


def _without(journals: Journals, replica: str) -> set[int]:
    """The steps that others committed without this replica."""
    lines = (line for other in journals.by_replica for line in step_lines(journals, other))
    return {line.step for line in lines if replica not in line.contributors}


def retried_steps(steps: Sequence[Step], start: float, end: float) -> int:
    return sum(step.retried for step in in_window(steps, start, end))


def first_contribution(journals: Journals, replica: str, after: float) -> float | None:
    """When the first step after this time was committed with this replica among the contributors."""
    times = [line.t_commit for line in step_lines(journals, replica) if replica in line.contributors]
    return min((time for time in times if time is not None and time > after), default=None)


def first_without(journals: Journals, survivors: Sequence[str], lost: str, after: float) -> float | None:
    """When the survivors first committed a step without the lost replica."""
    times = [
        line.t_commit
        for replica in survivors
        for line in step_lines(journals, replica)
        if lost not in line.contributors and line.t_commit is not None and line.t_commit > after
    ]
    return min(times, default=None)


def first_epoch_without(journals: Journals, survivors: Sequence[str], lost: str, after: float) -> float | None:
    """When the first survivor entered a membership without the lost replica: it was told of the loss."""
    times = [
        line.mono
        for replica in survivors
        for line in journals[replica].of_kind("epoch")
        if line.mono > after and lost not in line.contributors
    ]
    return min(times, default=None)


def last_contribution(journals: Journals, replica: str, after: float, before: float) -> float | None:
    """When the last step of this window to which the replica contributed was committed."""
    times = [line.t_commit for line in step_lines(journals, replica) if replica in line.contributors]
    return max((time for time in times if time is not None and after < time < before), default=None)


def rail_event(
    journals: Journals,
    replicas: Sequence[str],
    rail: str,
    after: float,
    *,
    state: str | None = None,
    active: bool | None = None,
) -> float | None:
    """When one of these replicas first reported this of a rail, after this time."""
    times = [
        line.t_event or line.mono
        for replica in replicas
        for line in journals[replica].of_kind("rail")
        if line.rail == rail
        and (line.t_event or line.mono) > after
        and (state is None or line.state == state)
        and (active is None or line.active == active)
    ]
    return min(times, default=None)


def losses(journals: Journals, count: int = 5) -> tuple[float | None, float | None]:
    """Mean loss over the first and over the last `count` steps that anybody contributed to."""
    by_step: dict[int, list[float]] = {}
    for replica in journals.by_replica:
        for line in step_lines(journals, replica):
            if line.loss is not None and replica in line.contributors:
                by_step.setdefault(line.step, []).append(line.loss)
    if not by_step:
        return None, None
    means = [statistics.fmean(by_step[number]) for number in sorted(by_step)]
    return statistics.fmean(means[:count]), statistics.fmean(means[-count:])


@dataclass(frozen=True)
class End:
    """How a replica ended: its last step, its exit code, and digests of what it then held."""

    step: int
    exit_code: int | None
    parameters: str
    optimizer: str


def ends(journals: Journals, replicas: Sequence[str]) -> dict[str, End | None]:
    """The last end that each replica recorded; None: none since its last start (it runs, or was killed)."""
    found: dict[str, End | None] = {}
    for replica in replicas:
        last = next((line for line in reversed(journals[replica].lines) if line.kind in ("start", "end")), None)
        found[replica] = (
            End(last.step, last.exit_code, last.params_digest, last.optimizer_digest)
            if last is not None and last.kind == "end"
            else None
        )
    return found


def identical(final: dict[str, End | None]) -> bool:
    """True if all replicas ended, at the same step, with the same parameters and optimizer state, bit for bit."""
    values = set(final.values())
    return len(values) == 1 and all(end is not None and bool(end.parameters) for end in values)
