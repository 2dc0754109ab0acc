"""What a live view remembers between two looks: pure, from snapshots and events with the times at which they came.

Everything is bounded: a view that stays open for a week holds as much as after four minutes. What goes away (an agent,
the coordinator) stays in the picture with the time since when, and what it last said.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.api.models import EventRecord, JobState
from ftctl.client.cluster import Snapshot

POINTS = 240  # of a curve
EVENTS = 200


@dataclass
class Curve:
    """The last values of something, the newest last; None where nothing was known."""

    points: deque[float | None] = field(default_factory=lambda: deque(maxlen=POINTS))

    def add(self, value: float | None) -> None:
        self.points.append(value)

    def newest(self, count: int) -> list[float | None]:
        return list(self.points)[-count:] if count > 0 else []

    def last(self) -> float | None:
        return next((value for value in reversed(self.points) if value is not None), None)


@dataclass
class Picture:
    """Of a cluster, over time. Times: Unix seconds of this machine."""

    snapshot: Snapshot | None = None
    trouble: str = ""  # why there is no newer snapshot
    job: JobState | None = None  # the last one that was heard
    job_lost_since: float | None = None
    lost_since: dict[str, float] = field(default_factory=dict)  # nodes whose agent does not answer
    step_ms: Curve = field(default_factory=Curve)
    tokens_per_s: Curve = field(default_factory=Curve)
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=EVENTS))
    _advanced: tuple[float, int] | None = None  # when the step was last seen to move, and to which

    def see(self, snapshot: Snapshot) -> None:
        self.snapshot, self.trouble = snapshot, ""
        now = snapshot.time
        silent = {node.name for node in snapshot.nodes if node.view is None}
        self.lost_since = {name: self.lost_since.get(name, now) for name in sorted(silent)}
        if snapshot.job is not None:
            self.job, self.job_lost_since = snapshot.job, None
        elif self.job_lost_since is None:
            self.job_lost_since = now
        self.step_ms.add(self._length_of_a_step(now, snapshot.job))
        self.tokens_per_s.add(_tokens(snapshot))

    def heard(self, event: EventRecord) -> None:
        self.events.append(event)

    def missed(self, why: str) -> None:
        """A look that brought nothing."""
        self.trouble = why
        self.step_ms.add(None)
        self.tokens_per_s.add(None)

    def _length_of_a_step(self, now: float, job: JobState | None) -> float | None:
        """Between two looks, in milliseconds a step. While none is committed it grows, as a stall does."""
        if job is None:
            return None
        before = self._advanced
        if before is None or job.step < before[1]:  # the first look; or a job that began again from a checkpoint
            self._advanced = (now, job.step)
            return job.step_ms_median
        took_ms = max(0.0, now - before[0]) * 1000
        if job.step > before[1]:
            self._advanced = (now, job.step)
            return took_ms / (job.step - before[1])
        running = self.step_ms.last()
        return took_ms if running is None else max(running, took_ms) if job.state != "finished" else None


def _tokens(snapshot: Snapshot) -> float | None:
    """Of all ranks that contribute; None where no rank says so."""
    job = snapshot.job
    in_ring = set(job.contributors) if job is not None else None
    said = [
        rank.tokens_per_s
        for view in snapshot.views()
        for rank in view.ranks
        if rank.job == snapshot.job_name and (in_ring is None or rank.replica in in_ring)
    ]
    total = sum(said)
    return total if total > 0 else None
