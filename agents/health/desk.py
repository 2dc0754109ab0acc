"""The one place where verdicts are made: monitors report here, views, events, metrics and the policy read here.

A thin shell around the incident book: a lock, the clock, and the events. `listen` is for the policy: it hears every
piece of news in the order in which it happened, in the thread of the monitor that reported, and must be quick.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Sequence

from agents.api.health import HealthAnswer, MonitorView, Verdict
from agents.api.words import Health
from agents.health.causes import WORST_FIRST, Moment, News
from agents.health.incidents import IncidentBook
from agents.health.signals import Observed, Signal
from agents.host.clock import Clock, SystemClock

Emit = Callable[..., None]
Listener = Callable[[News], None]
Forget = Callable[[str, str], Collection[str]]


def new_incident() -> str:
    return f"i-{secrets.token_hex(4)}"


class HealthDesk:
    """Thread-safe."""

    def __init__(self, node: str, emit: Emit, clock: Clock | None = None, *, rails: Sequence[str] = ()) -> None:
        self._node = node
        self._emit = emit
        self._clock = clock or SystemClock()
        self._rails = frozenset(f"nic {rail}" for rail in rails)
        self._lock = threading.RLock()
        self._book = IncidentBook(node, new_incident)
        self._listeners: list[Listener] = []
        self._forgetters: list[Forget] = []
        self._monitors: dict[str, MonitorView] = {}

    def moment(self) -> Moment:
        return Moment(self._clock.boot_s(), self._clock.wall_s())

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def clears(self, forget: Forget) -> None:
        """`forget` (kind, name of the object) is called when an operator has seen to it, and returns the codes of the
        readings that are over with what it forgot."""
        self._forgetters.append(forget)

    def see(self, scope: str, observed: Collection[Observed]) -> None:
        """A monitor's whole view, now."""
        with self._lock:
            self._book.see(self.moment(), scope, observed)
            self._tell()

    def occur(self, signal: Signal, count: int = 1) -> str:
        """Something happened. Returns the id of its incident."""
        with self._lock:
            incident = self._book.occur(self.moment(), signal, count)
            self._tell()
            return incident

    def retract(self, source: str, why: str, of: Callable[[Signal], bool]) -> int:
        with self._lock:
            ended = self._book.retract(self.moment(), source, why, of=of)
            self._tell()
            return ended

    def clear(self, kind: str, name: str, why: str) -> int:
        with self._lock:
            codes = {code for forget in self._forgetters for code in forget(kind, name)}
            ended = self._book.clear(self.moment(), kind, name, why, codes)
            self._tell()
            return ended

    def knows(self, kind: str, name: str) -> bool:
        with self._lock:
            return (kind, name) in self._book.things

    def names(self, kind: str) -> list[str]:
        """The objects of this kind, at most 20 of them."""
        with self._lock:
            return sorted(thing.object for thing in self._book.things.values() if thing.kind == kind)[:20]

    def codes(self, kind: str, name: str) -> frozenset[str]:
        """All that was seen in its open incident."""
        with self._lock:
            thing = self._book.things.get((kind, name))
            incident = thing.incident if thing is not None else None
            return frozenset(incident.codes) if incident is not None else frozenset()

    def tick(self, open_faults: Collection[str] = ()) -> None:
        with self._lock:
            self._book.tick(self.moment(), open_faults)
            self._tell()

    def monitor(self, name: str, *, ok: bool, note: str = "") -> None:
        """How the monitor itself is doing."""
        with self._lock:
            self._monitors[name] = MonitorView(name=name, ok=ok, note=note)

    def verdicts(self) -> list[Verdict]:
        with self._lock:
            return self._book.verdicts(self.moment())

    def worst(self, kind: str, name: str) -> Verdict | None:
        """What counts for one object: its worst verdict."""
        with self._lock:
            thing = self._book.things.get((kind, name))
            return next(iter(self._book.of(self.moment(), thing)), None) if thing is not None else None

    def answer(self) -> HealthAnswer:
        with self._lock:
            now = self.moment()
            verdicts = self._book.verdicts(now)
            return HealthAnswer.model_validate(
                {
                    "schema": 1,
                    "node": self._node,
                    "time": now.wall,
                    "health": verdicts[0].health if verdicts else Health.UNKNOWN,
                    "verdicts": verdicts,
                    "incidents": self._book.incidents(now),
                    "monitors": list(self._monitors.values()),
                }
            )

    def _tell(self) -> None:
        for news in self._book.news():
            verdict = news.verdict
            self._emit(
                self._event_kind(news),
                f"{verdict.node}/{short(verdict)}",
                verdict.reason,
                injected=verdict.injected,
                incident=verdict.incident,
                verdict=verdict.health.value,
                action=verdict.action.value,
                evidence="\n".join(verdict.evidence),
            )
            for listener in self._listeners:
                listener(news)

    def _event_kind(self, news: News) -> str:
        verdict = news.verdict
        if verdict.kind == "nic" and verdict.object in self._rails:
            if verdict.health is Health.UNHEALTHY:
                return "rail.down"
            return "rail.up" if verdict.health is Health.HEALTHY else "rail.degraded"
        if verdict.health is Health.HEALTHY and not news.over:
            return f"{verdict.kind}.recorded"
        return f"{verdict.kind}.{verdict.health.value}"


def short(verdict: Verdict) -> str:
    """As problems and events name it: gpu3, rail0; others as they are."""
    kind, _, name = verdict.object.partition(" ")
    if kind == "nic" and name:
        return name
    return f"gpu{name}" if kind == "gpu" and name.isdigit() else verdict.object


def overall(verdicts: Collection[Verdict]) -> Health:
    return min((v.health for v in verdicts), key=WORST_FIRST.index, default=Health.UNKNOWN)
