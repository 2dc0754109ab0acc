"""What other monitors found (gpud, NVSentinel, DCGM, node-problem-detector, your own), as input like our own.

They say it over the API (POST /v1/verdicts) or in a file that is watched (agents/monitors/foreign.py). Their words are
kept apart by the name of the monitor: one can take back what it said, and nothing that others said.
"""

from __future__ import annotations

import threading

from agents.api.health import MAX_VERDICTS, ForeignVerdict, VerdictsRequest
from agents.api.words import Action, Health
from agents.health.desk import HealthDesk
from agents.health.signals import OWN, Ends, Signal

MAX_SOURCES = 16
FOREIGN = "said"  # the code of what has none

_Name = tuple[str, str, str]  # kind, object, code


class ForeignProblem(Exception):
    """What was said is not taken; the message says why."""


class Foreigners:
    """Thread-safe."""

    def __init__(self, desk: HealthDesk) -> None:
        self._desk = desk
        self._lock = threading.Lock()
        self._said: dict[str, set[_Name]] = {}

    def take(self, request: VerdictsRequest, *, trusted: bool = True) -> list[str]:
        """The incidents of the verdicts, in their order. Raises ForeignProblem; nothing is taken then."""
        source = request.source
        if source == OWN:
            raise ForeignProblem(f"{OWN} is the agent's own name")
        with self._lock:
            before = self._said.get(source, set())
            if source not in self._said and len(self._said) >= MAX_SOURCES:
                raise ForeignProblem(f"{MAX_SOURCES} monitors are heard already ({', '.join(sorted(self._said))})")
            named = {_name(one) for one in request.verdicts if one.health is not Health.HEALTHY}
            kept = named if request.complete else (before | named) - self._taken_back(request, before | named)
            if len(kept) > MAX_VERDICTS:
                raise ForeignProblem(f"{source} says {len(kept)} things at a time; {MAX_VERDICTS} are kept")
            if request.complete:
                self._retract(source, before - named)
            incidents = [self._one(source, one, kept) for one in request.verdicts]
            self._said[source] = kept
            return incidents

    @staticmethod
    def _taken_back(request: VerdictsRequest, said: set[_Name]) -> set[_Name]:
        last = {_name(one): one for one in request.verdicts}
        well = [one for one in last.values() if one.health is Health.HEALTHY]
        return {name for name in said if any(_meant(one, name) for one in well) and _unsaid(last.get(name))}

    def _one(self, source: str, one: ForeignVerdict, kept: set[_Name]) -> str:
        if one.health is Health.HEALTHY:
            why = f"{source}: {one.reason}" if one.reason else f"{source} says that it is well"

            def gone(signal: Signal) -> bool:
                name = (signal.kind, signal.object, signal.code)
                return _meant(one, name) and name not in kept

            self._desk.retract(source, why, gone)
            return ""
        return self._desk.occur(signal_of(source, one))

    def _retract(self, source: str, gone: set[_Name]) -> None:
        if gone:
            self._desk.retract(
                source, f"{source} does not say it any more", lambda s: (s.kind, s.object, s.code) in gone
            )


def _name(one: ForeignVerdict) -> _Name:
    return (one.kind, one.object, one.code or FOREIGN)


def _meant(well: ForeignVerdict, name: _Name) -> bool:
    return name[:2] == (well.kind, well.object) and well.code in (None, name[2])


def _unsaid(one: ForeignVerdict | None) -> bool:
    return one is None or one.health is Health.HEALTHY


def signal_of(source: str, one: ForeignVerdict) -> Signal:
    usual = Action.CHECK if one.health is Health.UNHEALTHY else Action.WATCH
    return Signal(
        kind=one.kind,
        object=one.object,
        code=one.code or FOREIGN,
        health=one.health,
        reason=one.reason or f"{source} says that it is {one.health.value}",
        action=one.action if one.action is not None else usual,
        evidence=tuple(one.evidence),
        uuid=one.uuid,
        injected=one.injected,
        source=source,
        ends=Ends.QUIET if one.ttl_s > 0 else Ends.CLEAR,
        quiet_s=one.ttl_s or float("inf"),
    )
