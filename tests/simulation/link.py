"""What lies between a coordinator and a member of the simulated cluster."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftar_core.wire.messages import Message

if TYPE_CHECKING:
    from .life import Life
    from .server import Server


@dataclass
class Link:
    """One control connection. `up` and `down` are what is on the way; each end notices a break in its own time."""

    conn: int
    server: Server
    life: Life
    up: deque[Message] = field(default_factory=deque)
    down: deque[Message] = field(default_factory=deque)
    broken: bool = False
    server_open: bool = False  # the server's machine knows of it
    life_open: bool = True

    def cut(self) -> None:
        """From now on nothing gets through; what is on the way is lost on the side that notices first, or later."""
        self.broken = True
