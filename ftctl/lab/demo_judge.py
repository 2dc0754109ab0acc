"""From what the demo did and when, and the replicas' journals, to what each incident cost. Pure.

Each kind of incident has a window in which healthy replicas may have been held up, and its own meaning of "recovered":

rail-down         from the loss of carrier until the repair begins; recovered with the first step whose gradients were
                  produced after somebody noticed: it went over the backup from its first byte
rail-up           from the return of carrier to the next incident; recovered when the rail carries the data again
replica-killed    from SIGKILL to the first step committed without it; recovered when the replica contributes again
replica-drained   from the request to the third step without it; recovered (done) when its last step was committed
replica-rejoined  from the start of its new life, or from the request, to the third step with it; recovered with the
                  first of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftctl.lab import analysis
from ftctl.lab.analysis import NotEnough, Step, Worst
from ftctl.lab.demo_report import Incident
from ftctl.lab.journal import Journals

WITNESS_LATE_S = 0.25
STEPS_AFTER = 3  # a membership has settled when it has committed this many steps


@dataclass(frozen=True)
class Mark:
    """Something that the demo did. Times in CLOCK_MONOTONIC seconds.

    start: carrier lost or back, signal or request sent. end: when the demo went on to something else. seen: when the
    demo saw the recovery itself (later than it was, by a poll). `replica` is the one it was done to; `rail` and
    `watchers` (replicas whose links use that rail) for rails.
    """

    kind: str
    target: str
    replica: str
    start: float
    end: float
    seen: float | None = None
    rail: str = ""
    watchers: tuple[str, ...] = ()


def judge(journals: Journals, marks: Sequence[Mark], replicas: Sequence[str]) -> tuple[list[Incident], list[str]]:
    """The incidents in order, and what could not be measured."""
    incidents: list[Incident] = []
    problems: list[str] = []
    for mark in marks:
        survivors = [name for name in replicas if name != mark.replica or mark.kind.startswith("rail-")]
        steps = analysis.steps_of(journals, survivors)
        detected = _detected(journals, mark, survivors)
        recovered = _recovered(journals, mark, steps, detected)
        start, end = _window(journals, mark, survivors, steps)
        worst: Worst | None = None
        try:
            calm = analysis.calm_before(steps, mark.start)
            measure = analysis.longest_step if mark.kind == "replica-rejoined" else analysis.worst_stall
            worst = measure(steps, calm, start, end)
        except NotEnough as error:
            problems.append(f"{mark.kind} {mark.target}: {error}")
        incidents.append(
            Incident(
                kind=mark.kind,
                target=mark.target,
                detect_ms=None if detected is None else max(0.0, detected - mark.start) * 1000.0,
                stall_ms=None if worst is None else worst.excess_ms,
                steps_lost=analysis.steps_lost(journals, survivors, start, end),
                recover_s=None if recovered is None else recovered - mark.start,
                steps_retried=analysis.retried_steps(steps, start, end),
                step=None if worst is None else worst.step,
            )
        )
    return incidents, problems


def _detected(journals: Journals, mark: Mark, survivors: Sequence[str]) -> float | None:
    if mark.kind == "rail-down":
        # The links may know before the witness does, who only looks now and then.
        after = mark.start - WITNESS_LATE_S
        return analysis.rail_event(journals, mark.watchers, mark.rail, after, state="DOWN")
    if mark.kind == "rail-up":
        return analysis.rail_event(journals, mark.watchers, mark.rail, mark.start)
    if mark.kind == "replica-killed":
        return analysis.first_epoch_without(journals, survivors, mark.replica, mark.start)
    return None


def _recovered(journals: Journals, mark: Mark, steps: Sequence[Step], detected: float | None) -> float | None:
    if mark.kind == "rail-down":
        noticed = mark.start if detected is None else detected
        return next((step.committed for step in steps if step.produced > noticed), None)
    if mark.kind == "rail-up":
        return analysis.rail_event(journals, mark.watchers, mark.rail, mark.start, active=True) or mark.seen
    if mark.kind == "replica-drained":
        return analysis.last_contribution(journals, mark.replica, mark.start, mark.end)
    return analysis.first_contribution(journals, mark.replica, mark.start)


def _window(journals: Journals, mark: Mark, survivors: Sequence[str], steps: Sequence[Step]) -> tuple[float, float]:
    if mark.kind == "replica-killed":
        # The retried step is the last one to be held up by the death; what catching up costs is the rejoin's.
        first = analysis.first_without(journals, survivors, mark.replica, mark.start)
        return mark.start, mark.end if first is None else first
    if mark.kind == "replica-drained":
        return mark.start, _after(steps, mark, present=False)
    if mark.kind == "replica-rejoined":
        return mark.start, _after(steps, mark, present=True)
    return mark.start, mark.end


def _after(steps: Sequence[Step], mark: Mark, *, present: bool) -> float:
    """The commit of the third step with, or without, the replica."""
    settled = [s.committed for s in steps if s.committed > mark.start and (mark.replica in s.contributors) == present]
    return settled[min(STEPS_AFTER, len(settled)) - 1] if settled else mark.end
