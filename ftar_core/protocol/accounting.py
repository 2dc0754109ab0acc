"""Where a job's time went: every microsecond since its first coordinator started, counted once. Pure.

What is reported in the field as effective training time is productive time by all time. FT-HSDP's model of it,
1 - (stall + rejoin stall) / MTBF - degraded time / (replicas x MTBF), falls out of the sums: the stalls are what steps
took longer than calm ones, and a step that fewer replicas than wanted made counts as productive in their share only.

A step is the time from commit to commit. It is judged when it commits, by the median of the last calm steps:

* not longer than that by more than noise: all of it was work;
* longer: what is beyond the median was lost. To what, says the first cause in the order of `Loss` that was seen during
  the step; of a step that was reduced again after a loss, the time since then is recomputed rather than stalled.
  Where nothing was seen, the step was slow, which is a loss of its own and is not hidden. A job that is slower for good
  has another calm step soon: that is for the step's time to show, not for this.
* Of what is left, the straggler's lead over the others, if there is one, is lost to it (it makes every step longer, so
  the median cannot show it); the share of replicas that are missing is degraded, by what took them out.
* A skipped step was for nothing, and so was one that had been made before a restart from a checkpoint.

Time in which no step can be made (starting, holding, recovering) counts as it passes, whatever members compute then.

A commit costs the same for a hundred steps or ten million, two replicas or ten thousand: sums by cause, a window of
calm steps, and the absent by cause (computed when somebody comes or goes).

Over restarts of the coordinator (`Saved`): its last word may be some seconds old. The steps committed since
are known from the recovery, so as many calm steps of the gap were work, and the rest of it the coordinator was down.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import msgspec

from ftar_core.wire.accounting import AccountView, Category, Loss, Spent
from ftar_core.wire.views import CheckpointView

CALM_STEPS = 32
LEAST_NOISE_US = 5_000  # a difference smaller than this is the scheduler's
NOISE_SHARE = 10  # a tenth of a step; half of one while fewer than ENOUGH are known
ENOUGH = 8
NOISE_SPREADS = 4  # times the median distance from the median: of normal noise, one step in 150 is further off
FORMAT = 1
KNOWN_ABSENT = 10_000
DEATHS = frozenset(
    (Loss.KILLED, Loss.SILENT, Loss.HUNG, Loss.UNREACHABLE, Loss.DIVERGED, Loss.EVICTED, Loss.LEFT)
)  # a step that they break is reduced again
COUNTED = DEATHS | {Loss.DRAINED, Loss.REJOIN}  # when they happen, whatever they cost
ORDER = {cause: rank for rank, cause in enumerate(Loss)}
Key = tuple[Category, Loss | None]
Arrivals = tuple[dict[str, Loss], dict[Key, int]]
WORK: Key = (Category.PRODUCTIVE, None)
BEGINNING: Key = (Category.STARTING, None)
SLOW: Key = (Category.SLOW, None)
DRAINED: Key = (Category.STALLED, Loss.DRAINED)
REJOINED: Key = (Category.STALLED, Loss.REJOIN)
DOWN: Key = (Category.STALLED, Loss.COORDINATOR)


class Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a coordinator leaves for the next one. `wall`, `mono`, `boot`: the moment up to which all is counted, on
    both clocks, and which start of the machine `mono` belongs to (the shell's to fill in)."""

    since: float
    spent: tuple[Spent, ...]
    step: int  # the last that was committed
    high: int  # the highest that ever was
    calm_us: tuple[int, ...] = ()
    contributors: int = 0
    absent: dict[str, Loss] = msgspec.field(default_factory=dict)
    ended: bool = False
    wall: float = 0.0
    mono: float = 0.0
    boot: str = ""
    checkpoint: CheckpointView | None = None  # the shell's, too
    format: int = FORMAT


class Calm:
    """The last calm steps, in µs: their median and their noise."""

    def __init__(self, steps: tuple[int, ...] = ()) -> None:
        self._steps: deque[int] = deque()
        self._sorted: list[int] = []
        for step in steps[-CALM_STEPS:]:
            self.add(step)

    def add(self, us: int) -> None:
        if len(self._steps) == CALM_STEPS:
            del self._sorted[bisect_left(self._sorted, self._steps.popleft())]
        self._steps.append(us)
        insort(self._sorted, us)

    def median(self) -> int | None:
        """The lower one of an even number: it was measured."""
        return self._sorted[(len(self._sorted) - 1) // 2] if self._sorted else None

    def noise(self) -> int:
        """What a step may be longer than the median and still be calm."""
        middle = self.median()
        if middle is None:
            return 0
        off = sorted(abs(step - middle) for step in self._sorted)
        share = NOISE_SHARE if len(off) >= ENOUGH else 2
        return max(LEAST_NOISE_US, middle // share, NOISE_SPREADS * off[(len(off) - 1) // 2])

    def steps(self) -> tuple[int, ...]:
        return tuple(self._steps)


class Accounting:
    """One coordinator's book. `now` is its clock, seconds; where that goes backwards, time stands still here."""

    def __init__(
        self, now: float, replicas: int, saved: Saved | None = None, gap_s: float = 0.0, *, fresh: bool = False
    ) -> None:
        """`replicas`: wanted. `saved`: the last word of the life before, true `gap_s` ago. `fresh`: the store begins
        anew, so `saved` is of this job only if that goes on from a checkpoint."""
        self.calm = Calm()
        self.step = 0  # the last that was committed
        self.high = 0  # and the highest that ever was
        self.ran = False  # in this life
        self.ended = False
        self._replicas = replicas
        self._since: float | None = None
        self._us: dict[Key, int] = {}
        self._counts: dict[Key, int] = {}
        self._contributors = 0
        self._absent: dict[str, Loss] = {}
        self._shares: tuple[tuple[Loss, int], ...] | None = None  # of those missing, by cause; None: not known yet
        self._before = 0  # counted in earlier lives, and the gap
        self._gap = 0  # before this life, while it is not known what it was
        self._at = self._began = _us(now)
        self._earlier = None if saved is None else (saved, max(0, _us(gap_s)))
        if not fresh:
            self._adopt()
        self._opening = not self.high  # nothing was ever committed, or all begins again
        self._stands: Key | None = BEGINNING if self._opening else DOWN  # no step can be made; None: one is
        self._running = 0  # of the running step, not counted yet
        self._again = 0  # of that, since it is reduced again
        self._retried = False
        self._seen: set[Loss] = set()
        self._paid = False  # the commit of the running step was taken back: its work is counted
        self._count(self._stands or BEGINNING)

    def _adopt(self) -> None:
        """Go on with the book of the life before."""
        if self._earlier is None:
            return
        (saved, gap), self._earlier = self._earlier, None
        self.calm = Calm(saved.calm_us)
        self.step, self.high, self._since = saved.step, saved.high, saved.since
        for entry in saved.spent:
            self._add((entry.category, entry.cause), entry.us)
            self._count((entry.category, entry.cause), entry.count)
        self._contributors, self._absent, self._shares = saved.contributors, dict(saved.absent), None
        self._gap = 0 if saved.ended else gap
        self._before = self._gap + sum(entry.us for entry in saved.spent)

    # --- what happens

    def stand(self, why: Key | None, now: float) -> None:
        """From now on no step can be made, or (None) one can."""
        if why != self._stands and not self.ended:
            self._pass(now)
            self._stands = why
            self._opening = self._opening or why == BEGINNING
            if why is not None:
                self._count(why)
        self.ran = self.ran or why is None

    def end(self, now: float) -> None:
        """The job is over: time counts no more. A step that runs was for nothing."""
        if not self.ended:
            self._pass(now)
            cause = self._cause()
            self._add((Category.STALLED, cause) if cause is not None else self._stands or SLOW, self._running)
            self._add(DOWN if self.high else BEGINNING, self._gap)
            self._running, self._gap, self.ended = 0, 0, True

    def see(self, cause: Loss) -> None:
        """Something goes on in the running step that may make it longer."""
        self._seen.add(cause)

    def lost(self, name: str, cause: Loss, now: float) -> None:
        """A contributor is gone: in the running step, or (drained) with the commit before it."""
        self._pass(now)
        self._seen.add(cause)
        self._count((Category.STALLED, cause))
        self._absent.pop(name, None)
        self._absent[name] = cause
        while len(self._absent) > KNOWN_ABSENT:
            del self._absent[next(iter(self._absent))]
        self._shares = None

    def joined(self, name: str) -> None:
        """It contributes from the running step on."""
        self._absent.pop(name, None)
        self._shares = None
        if not self._opening:
            self._seen.add(Loss.REJOIN)
            self._count(REJOINED)

    def again(self, now: float) -> None:
        """A new epoch: the running step is reduced again."""
        self._pass(now)
        self._retried = True

    def begins(self, step: int, now: float) -> None:
        """`step` is the running one, after a start or a recovery. If others were committed since the last one known
        here, each took a calm step's time, of that which is not counted yet; in the rest nothing was done."""
        self._pass(now)
        if step > 1:
            self._adopt()
        self._earlier = None
        made = max(0, step - 1 - self.step)
        if not self.high:
            self._add(BEGINNING, self._gap)
            self._gap = 0
        else:
            left = self._gap + (self._running if made else 0)
            self._running = 0 if made else self._running
            if self._gap and self._opening:
                self._count(DOWN)
            idle: Key = DOWN if self._gap or not self.ran else (Category.STALLED, Loss.VANISHED)
            work = min(left, made * (self.calm.median() or 0))
            self._gap = 0
            self._add(idle, left - work)
            self._share(work, made)
            self._seen.add(Loss.VANISHED if self.ran else Loss.COORDINATOR)
        self.step, self.high, self._paid = step - 1, max(self.high, step - 1), False

    def committed(self, step: int, contributors: int, now: float, *, skipped: bool = False, lead_ms: float = 0) -> None:
        """Step `step` is true now, made by so many replicas. `lead_ms`: so much longer than the others' median the
        straggler has computed, if there is one."""
        self._pass(now)
        if contributors != self._contributors:
            self._contributors, self._shares = contributors, None
        if self._opening:
            self._add(BEGINNING, self._running)
            self._opening = False
        else:
            work = self._judge(_us(lead_ms / 1000))
            if step <= self.high and not self._paid:
                self._waste((Category.RECOMPUTED, Loss.RESTART), work)
            elif skipped:
                self._waste((Category.STALLED, Loss.NONFINITE), work)
            else:
                self._share(work, 0 if self._paid else 1)
        self.step, self.high = step, max(self.high, step)
        self._running = self._again = 0
        self._retried = self._paid = False
        self._seen.clear()

    def arrivals(self) -> Arrivals:
        """Who is away, and how often somebody came or went: for `undone`."""
        return dict(self._absent), {key: self._counts[key] for key in (DRAINED, REJOINED) if key in self._counts}

    def undone(self, step: int, arrivals: Arrivals) -> None:
        """The commit of `step`, or a change of membership, could not be written down: it will come again. The work of
        the step is counted already."""
        self._absent, counts = dict(arrivals[0]), arrivals[1]
        for key in (DRAINED, REJOINED):
            self._counts.pop(key, None)
        self._counts.update(counts)
        self._shares = None
        if step and self.step == step:
            self.step, self._paid = step - 1, True
            self._seen.add(Loss.RECORD)

    # --- what is known

    def late(self, now: float) -> bool:
        """The running step is longer than a calm one, by more than noise."""
        self._pass(now)
        middle = self.calm.median()
        return middle is not None and self._running - middle > self.calm.noise()

    def elapsed_us(self) -> int:
        """All time, as the clock said; the sum of what is counted and `uncounted_us`."""
        return self._before + self._at - self._began

    def uncounted_us(self) -> int:
        """Of the running step, and of the gap before this life while it is not known what it was."""
        return self._running + self._gap

    def view(self, now: float, wall: float) -> AccountView:
        """`wall`: `now` in Unix seconds."""
        self._pass(now)
        spent, late = self._spent(), None
        if self._stands is None and self.late(now):
            cause = self._cause()
            beyond = self._running - (self.calm.median() or 0)
            late = Spent(category=Category.STALLED if cause else Category.SLOW, cause=cause, us=beyond, count=1)
        since = self._started(wall)
        return AccountView(
            since=since, total_us=sum(s.us for s in spent), spent=spent, calm_us=self.calm.median(), late=late
        )

    def saved(self, now: float, wall: float) -> Saved:
        """For the next life. What is not counted yet will be part of its gap."""
        self._pass(now)
        return Saved(
            since=self._started(wall),
            spent=self._spent(),
            step=self.step,
            high=self.high,
            calm_us=self.calm.steps(),
            contributors=self._contributors,
            absent=dict(self._absent),
            ended=self.ended,
            wall=wall - self.uncounted_us() / 1e6,
            mono=now - self.uncounted_us() / 1e6,
        )

    # --- counting

    def _pass(self, now: float) -> None:
        """Time has come to `now`."""
        at = max(self._at, _us(now))
        passed = at - self._at
        self._at = at
        if self.ended:
            self._began += passed
        elif self._stands is not None:
            self._add(self._stands, passed)
        else:
            self._running += passed
            self._again += passed if self._retried else 0

    def _cause(self) -> Loss | None:
        return min(self._seen, key=ORDER.__getitem__, default=None)

    def _judge(self, lead_us: int) -> int:
        """Count what the running step has lost, at its commit; how much of it was work."""
        whole, middle, cause = self._running, self.calm.median(), self._cause()
        if self._paid:
            self._waste((Category.STALLED, Loss.RECORD), whole)
            return 0
        beyond = whole - middle if middle is not None and whole - middle > self.calm.noise() else 0
        lead = 0
        if cause is None:
            self.calm.add(whole)
            if lead_us > 0:
                cause = Loss.STRAGGLER
                lead = min(whole - beyond, max(0, lead_us - beyond))
        if beyond + lead == 0:
            return whole
        again = min(beyond, self._again) if cause in DEATHS else 0
        if again:
            self._waste((Category.RECOMPUTED, cause), again)
        key: Key = SLOW if cause is None else (Category.STALLED, cause)
        self._add(key, beyond + lead - again)
        if cause not in COUNTED:
            self._count(key)
        return whole - beyond - lead

    def _waste(self, key: Key, us: int) -> None:
        self._add(key, us)
        self._count(key)

    def _share(self, work: int, steps: int) -> None:
        """Work is productive in the share of those who made it."""
        left = work
        for cause, missing in self._missing():
            part = work * missing // self._replicas
            self._add((Category.DEGRADED, cause), part)
            self._count((Category.DEGRADED, cause), steps)
            left -= part
        self._add(WORK, left)
        self._count(WORK, steps)

    def _missing(self) -> tuple[tuple[Loss, int], ...]:
        """How many of the wanted replicas do not contribute, by what took them out; who left last is missing first."""
        if self._shares is None:
            missing = max(0, self._replicas - self._contributors)
            counts: dict[Loss, int] = {}
            for cause in list(self._absent.values())[-missing:] if missing else ():
                counts[cause] = counts.get(cause, 0) + 1
            unknown = missing - sum(counts.values())
            if unknown:
                counts[Loss.ABSENT] = unknown
            self._shares = tuple(counts.items())
        return self._shares

    def _started(self, wall: float) -> float:
        if self._since is None:
            self._since = wall - (self._at - self._began) / 1e6
        return self._since

    def _spent(self) -> tuple[Spent, ...]:
        keys = sorted({*self._us, *self._counts}, key=lambda key: (list(Category).index(key[0]), _rank(key[1])))
        found = (
            Spent(category=c, cause=w, us=self._us.get((c, w), 0), count=self._counts.get((c, w), 0)) for c, w in keys
        )
        return tuple(entry for entry in found if entry.us or entry.count)

    def _add(self, key: Key, us: int) -> None:
        if us:
            self._us[key] = self._us.get(key, 0) + us

    def _count(self, key: Key, times: int = 1) -> None:
        if times:
            self._counts[key] = self._counts.get(key, 0) + times


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _rank(cause: Loss | None) -> int:
    return -1 if cause is None else ORDER[cause]
