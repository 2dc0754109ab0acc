"""What the policy says: an event for each decision and what came of it, and the last ones for `ftctl policy show`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from agents.api.health import Verdict
from agents.api.policy import DecisionView
from agents.because import Because
from agents.health.desk import short
from agents.host.clock import Clock

Emit = Callable[..., None]
KEPT_DECISIONS = 50


class Teller:
    def __init__(self, node: str, emit: Emit, clock: Clock) -> None:
        self.node = node
        self._emit, self._clock = emit, clock
        self._told: deque[DecisionView] = deque(maxlen=KEPT_DECISIONS)

    def last(self) -> list[DecisionView]:
        return list(self._told)

    def tell(self, kind: str, verdict: Verdict, reason: str, action: str) -> None:
        """`kind`: policy.decided, policy.acted, policy.failed or policy.released."""
        told = DecisionView(
            time=self._clock.wall_s(),
            kind=kind,
            object=verdict.object,
            incident=verdict.incident,
            action=action,
            reason=reason,
        )
        self._told.append(told)
        self._emit(
            kind,
            f"{self.node}/{short(verdict)}",
            reason,
            injected=verdict.injected,
            incident=verdict.incident,
            verdict=verdict.health.value,
            action=action,
        )

    def note(self, kind: str, text: str) -> None:
        """About the policy itself."""
        self._emit(kind, self.node, text)

    def complain(self, text: str) -> None:
        self.note("policy.unrecorded", text)


def because(verdict: Verdict, action: str) -> Because:
    return Because(verdict.incident, action, verdict.injected)
