"""Why something is done to a replica: the incident it belongs to, which its events carry (`ftctl events
--incident`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Because:
    """Without an incident: an operator wanted it, or it happened by itself. `injected`: a fault of ours is behind
    it."""

    incident: str = ""
    action: str = ""
    injected: bool = False


NOTHING = Because()


class Emit(Protocol):
    def __call__(
        self, kind: str, thing: str, reason: str, /, *, incident: str = "", action: str = "", injected: bool = False
    ) -> None: ...


def tell(emit: Emit, kind: str, thing: str, reason: str, because: Because) -> None:
    if because.incident:
        emit(kind, thing, reason, incident=because.incident, action=because.action, injected=because.injected)
    else:
        emit(kind, thing, reason)
