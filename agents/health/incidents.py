"""The incident book: what is wrong with which object, since when, and what of it belongs together. Pure.

Everything wrong with one object at one time is one incident. It opens with the first bad word about the object and
closes with the last cause; what comes after that is a new incident. Inside it, a cause is one code of one source. Equal
news only counts up: a GPU in trouble writes the same line some 800,000 times, and neither memory nor events may grow
with that. What does grow is bounded: objects, causes of one, lines of evidence, histories, incidents remembered.

A cause that happened (a line, not a reading) is over when its signal says so (`Ends`). It counts as having come back
when it was over in between, or when another process caused it: then it is told again, and `times` goes up, by which
"the second time within a day" is judged. Rejected: one incident for each code, which makes an Xid, its consequence (45)
and the lost GPU three decisions about one failure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from agents.api.health import Incident, Verdict
from agents.api.words import Action, Health
from agents.health.causes import WORST_FIRST, Cause, Moment, News, OpenIncident, Thing, rank, ranked, span
from agents.health.signals import OWN, Ends, Observed, Signal

DAY_S = 86_400.0
MAX_OBJECTS = 1024
MAX_CAUSES = 32  # of one incident; further codes count as one
MAX_HISTORIES = 2048
TIMES_KEPT = 16
CLOSED_KEPT = 200
SETTLE_S = 10.0  # a reading proves nothing about a line this fresh: the driver may not have noticed yet
OTHER_PROCESS_S = 5.0  # several processes die of one fault, within moments
MORE, QUIET = "more", "quiet for"

Key = tuple[str, str]


class IncidentBook:
    def __init__(self, node: str, new_id: Callable[[], str], settle_s: float = SETTLE_S) -> None:
        self._node = node
        self._new_id = new_id
        self._settle_s = settle_s
        self.things: dict[Key, Thing] = {}
        self.closed: deque[Incident] = deque(maxlen=CLOSED_KEPT)
        self.history: OrderedDict[tuple[str, str, str], deque[float]] = OrderedDict()
        self._news: list[News] = []
        self.opened = 0  # incidents so far

    # --- what monitors say -------------------------------------------------------------------------------------------

    def see(self, now: Moment, scope: str, observed: Collection[Observed]) -> None:
        """All that the monitor `scope` watches, as it is now. What it does not name any more, it does not watch."""
        named: set[Key] = set()
        for one in observed:
            thing = self._thing(now, one.kind, one.object, one.uuid)
            named.add((thing.kind, thing.object))
            thing.seen[scope] = one
            for signal in one.signals:
                self._count(now, thing, signal, scope)
            self._end(now, thing, partial(self._healed, now, scope, one), one.reason)
        for key, thing in list(self.things.items()):
            if key not in named and scope in thing.seen:
                del thing.seen[scope]
                self._end(now, thing, lambda cause: cause.scope == scope, "not watched any more")
                self._forget(thing)

    def occur(self, now: Moment, signal: Signal, count: int = 1) -> str:
        """It happened, `count` times. Returns the incident's id."""
        thing = self._thing(now, signal.kind, signal.object, signal.uuid)
        self._end(now, thing, partial(self._quiet, now), QUIET)
        self._count(now, thing, signal, "", count)
        return thing.incident.id if thing.incident is not None else ""

    def retract(self, now: Moment, source: str, why: str, *, of: Callable[[Signal], bool]) -> int:
        """A source takes back what it said of things that happened. Returns how many verdicts."""
        return sum(
            self._end(now, thing, lambda c: not c.scope and c.signal.source == source and of(c.signal), why)
            for thing in list(self.things.values())
        )

    def clear(self, now: Moment, kind: str, name: str, why: str, codes: Collection[str] = ()) -> int:
        """An operator has seen to it: what happened is over, and how often it happened is forgotten. `codes`: of
        readings that are over as well."""
        for key in [key for key in self.history if key[:2] == (kind, name)]:
            del self.history[key]
        thing = self.things.get((kind, name))
        if thing is None:
            return 0
        for scope, seen in thing.seen.items():
            left = tuple(signal for signal in seen.signals if signal.code not in codes)
            if len(left) < len(seen.signals):  # the next look finds what is still wrong
                health = min((signal.health for signal in left), key=WORST_FIRST.index, default=Health.HEALTHY)
                thing.seen[scope] = replace(seen, signals=left, health=health, reason=left[0].reason if left else why)
        return self._end(now, thing, lambda cause: not cause.scope or cause.signal.code in codes, why)

    def tick(self, now: Moment, open_faults: Collection[str] = ()) -> None:
        """Time has passed; what injected faults did is over with them."""
        for thing in list(self.things.values()):
            if thing.incident is None:
                self._forget(thing)
                continue
            self._end(now, thing, lambda c: bool(not c.scope and c.signal.fault and c.signal.fault not in open_faults),
                      "the injected fault is over")  # fmt: skip
            self._end(now, thing, partial(self._quiet, now), QUIET)

    def news(self) -> list[News]:
        """What is to be told, in order; each once."""
        news, self._news = self._news, []
        return news

    # --- what there is -----------------------------------------------------------------------------------------------

    def verdicts(self, now: Moment) -> list[Verdict]:
        """Worst first; one for each cause, or one for what is well."""
        found = [verdict for thing in self.things.values() for verdict in self.of(now, thing)]
        return sorted(found, key=lambda v: (WORST_FIRST.index(v.health), v.kind, v.object))

    def of(self, now: Moment, thing: Thing) -> list[Verdict]:
        if thing.incident is not None:
            return [self._verdict(now, thing, cause) for cause in ranked(thing.incident.causes.values())]
        seen = self._state(thing)
        if seen is None:
            return []
        return [self._well(now, thing, seen)]

    def incidents(self, now: Moment) -> list[Incident]:
        """The open ones, the newest first; then those closed lately, the last one first."""
        opened = [self._incident(now, thing) for thing in self.things.values() if thing.incident is not None]
        return [*sorted(opened, key=lambda one: -one.opened), *reversed(self.closed)]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _thing(self, now: Moment, kind: str, name: str, uuid: str) -> Thing:
        key = (kind, name)
        thing = self.things.get(key)
        if thing is None:
            if len(self.things) >= MAX_OBJECTS:
                key = ("node", "further objects")
            thing = self.things.setdefault(key, Thing(*key, well_since=now.s))
        if uuid:
            thing.uuid = uuid
        return thing

    def _forget(self, thing: Thing) -> None:
        if thing.incident is None and not thing.seen:
            self.things.pop((thing.kind, thing.object), None)

    def _count(self, now: Moment, thing: Thing, signal: Signal, scope: str, count: int = 1) -> None:
        incident = thing.incident
        if incident is None:
            incident = thing.incident = OpenIncident(self._new_id(), now.s, now.s)
            self.opened += 1
        key = (signal.source, signal.code)
        if key not in incident.causes and len(incident.causes) >= MAX_CAUSES:
            key = (OWN, MORE)
            signal = replace(signal, source=OWN, code=MORE)
        cause = incident.causes.get(key)
        before = (cause.signal.health, cause.signal.action) if cause is not None else None
        again = cause is None or self._came_back(now, cause, signal)
        if cause is None:
            cause = incident.causes[key] = Cause(signal, now.s, now.s, now.s, 0, scope=scope)
        if again:
            cause.began = now.s
            cause.times = self._times(now, thing, signal)
        suggested = replace(signal, action=self._suggested(now, thing, signal, cause.times))
        if not (signal.via and before is not None and rank(suggested) > rank(cause.signal)):
            cause.signal = suggested  # one way to hear of it tells less than the other, and may come later
        cause.process = signal.process or cause.process
        cause.last = now.s
        count = cause.hear(signal.via, count)
        if not scope or again:
            cause.count += count
            incident.count += count
            incident.last = now.s
        cause.add_evidence(signal.evidence)
        if again or before != (cause.signal.health, cause.signal.action):
            self._note(incident, cause.signal)
            self._news.append(News(self._verdict(now, thing, cause)))

    @staticmethod
    def _came_back(now: Moment, cause: Cause, signal: Signal) -> bool:
        if cause.scope or signal.ends is not Ends.QUIET:
            return False
        other = bool(signal.process and cause.process and signal.process != cause.process)
        return other and now.s - cause.began > OTHER_PROCESS_S

    def _times(self, now: Moment, thing: Thing, signal: Signal) -> int:
        key = _history_key(thing, signal)
        times = self.history.setdefault(key, deque(maxlen=TIMES_KEPT))
        self.history.move_to_end(key)
        if len(self.history) > MAX_HISTORIES:
            self.history.popitem(last=False)
        times.append(now.s)
        return sum(now.s - at <= DAY_S for at in times)

    def _suggested(self, now: Moment, thing: Thing, signal: Signal, times: int) -> Action:
        if signal.repeat is None or times < signal.repeat.times:
            return signal.action
        at = self.history.get(_history_key(thing, signal), deque())
        recent = sum(now.s - one <= signal.repeat.within_s for one in at)
        return signal.repeat.action if recent >= signal.repeat.times else signal.action

    @staticmethod
    def _note(incident: OpenIncident, signal: Signal) -> None:
        """What the incident is remembered by."""
        if signal.code not in incident.codes and len(incident.codes) < MAX_CAUSES:
            incident.codes.append(signal.code)
        if signal.source not in incident.sources and len(incident.sources) < MAX_CAUSES:
            incident.sources.append(signal.source)
        incident.injected = incident.injected and signal.injected
        incident.simulated = incident.simulated or signal.simulated
        if incident.worst is None or rank(signal) < rank(incident.worst):
            incident.worst = signal

    def _healed(self, now: Moment, scope: str, seen: Observed, cause: Cause) -> bool:
        if cause.scope:
            return cause.scope == scope and all(
                (cause.signal.source, cause.signal.code) != (s.source, s.code) for s in seen.signals
            )
        settled = now.s - cause.last >= self._settle_s
        well = all(signal.health is Health.HEALTHY for signal in seen.signals)
        return cause.signal.ends is Ends.RECOVERY and seen.recovered and settled and well

    @staticmethod
    def _quiet(now: Moment, cause: Cause) -> bool:
        return not cause.scope and cause.signal.ends is Ends.QUIET and now.s - cause.last >= cause.signal.quiet_s

    def _end(self, now: Moment, thing: Thing, over: Callable[[Cause], bool], why: str) -> int:
        """Ends the causes that are `over`; the incident with the last of them. Returns how many."""
        incident = thing.incident
        if incident is None:
            return 0
        ended = [key for key, cause in incident.causes.items() if over(cause)]
        if not ended:
            return 0
        worst = next(iter(ranked(incident.causes.values())))
        for key in ended:
            del incident.causes[key]
        left = next(iter(ranked(incident.causes.values())), None)
        if left is None:
            self._close(now, thing, incident, f"{why} {span(now.s - worst.last)}" if why == QUIET else why)
        elif (left.signal.health, left.signal.code) != (worst.signal.health, worst.signal.code):
            self._news.append(News(self._verdict(now, thing, left), over=True))
        return len(ended)

    def _close(self, now: Moment, thing: Thing, incident: OpenIncident, why: str) -> None:
        view = self._incident(now, thing)
        self.closed.append(view.model_copy(update={"closed": now.wall, "why_closed": why}))
        thing.incident, thing.well_since = None, now.s
        if view.health is not Health.HEALTHY:  # what was only recorded ends without a word
            seen = self._state(thing) or Observed(thing.kind, thing.object, why, uuid=thing.uuid)
            words = why if why == seen.reason else f"{why}; {seen.reason}" if thing.seen else why
            well = self._well(now, thing, replace(seen, reason=f"{words} (after {span(now.s - incident.opened)})"))
            update = {"incident": incident.id, "injected": view.injected, "count": incident.count}
            self._news.append(News(well.model_copy(update=update), over=True))
        self._forget(thing)

    @staticmethod
    def _state(thing: Thing) -> Observed | None:
        return min(thing.seen.values(), key=lambda one: WORST_FIRST.index(one.health), default=None)

    def _well(self, now: Moment, thing: Thing, seen: Observed) -> Verdict:
        return Verdict(
            node=self._node,
            kind=thing.kind,
            object=thing.object,
            uuid=thing.uuid,
            health=seen.health,
            reason=seen.reason,
            since=now.wall - (now.s - thing.well_since),
            last=now.wall,
            simulated=seen.simulated,
        )

    def _verdict(self, now: Moment, thing: Thing, cause: Cause) -> Verdict:
        signal, ahead = cause.signal, now.wall - now.s
        return Verdict(
            node=self._node,
            kind=thing.kind,
            object=thing.object,
            uuid=thing.uuid,
            health=signal.health,
            reason=signal.reason,
            code=signal.code,
            evidence=list(cause.evidence),
            action=signal.action,
            hint=signal.hint,
            incident=thing.incident.id if thing.incident is not None else "",
            since=cause.first + ahead,
            last=cause.last + ahead,
            count=cause.count,
            times=cause.times,
            injected=signal.injected,
            fault=signal.fault,
            simulated=signal.simulated,
            source=signal.source,
        )

    def _incident(self, now: Moment, thing: Thing) -> Incident:
        incident, ahead = thing.incident, now.wall - now.s
        assert incident is not None  # noqa: S101 - callers looked
        worst = incident.worst
        return Incident(
            id=incident.id,
            node=self._node,
            kind=thing.kind,
            object=thing.object,
            uuid=thing.uuid,
            health=worst.health if worst is not None else Health.UNKNOWN,
            reason=worst.reason if worst is not None else "",
            action=worst.action if worst is not None else Action.NONE,
            codes=list(incident.codes),
            sources=list(incident.sources),
            opened=incident.opened + ahead,
            last=incident.last + ahead,
            count=incident.count,
            injected=incident.injected,
            simulated=incident.simulated,
        )


def _history_key(thing: Thing, signal: Signal) -> tuple[str, str, str]:
    return thing.kind, thing.object, f"{signal.code} {signal.unit}".rstrip()
