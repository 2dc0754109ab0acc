"""The session of this process, for what cannot be handed one: process groups are made before it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftar_core.training.session import Session

_last: weakref.ref[Session] | None = None


def made(session: Session) -> None:
    global _last
    _last = weakref.ref(session)


def session() -> Session | None:
    """The one made last, while somebody holds it."""
    return _last() if _last is not None else None
