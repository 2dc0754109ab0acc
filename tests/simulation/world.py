"""A cluster in memory: the real Coordinator and Member machines, and the least model of everything between them.

Connections are two queues; a session contributes, reduces and applies; a store refuses lower terms. Nothing happens by
itself: every possible next thing is an action that a driver takes, a seeded one (`chaos.py`) or a test's (`hand.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ftar_core.protocol.config import JobConfig
from ftar_core.protocol.events import (
    ConnectionClosed,
    Disconnected,
    MemberHello,
    MemberMessage,
    Received,
    Tick,
)
from ftar_core.wire.codec import to_leader_of_several
from ftar_core.wire.ids import NO_TERM, EpochId
from ftar_core.wire.messages import Commit, Deal, Hello

from .life import INITIAL, Kept, Life
from .link import Link
from .server import Server, Store
from .truth import Result, Truth


class World:
    """Everything that exists. `now` in seconds; the driver moves it."""

    def __init__(self, config: JobConfig, *, quiet: bool = True) -> None:
        self.config = config
        self.now = 0.0
        self.truth = Truth()
        self.store = Store()
        self.servers: list[Server] = []
        self.lives: list[Life] = []
        self.links: list[Link] = []
        self.ring: dict[tuple[EpochId, int], dict[str, tuple[str, int, int | None]]] = {}
        self.deals: dict[int, Deal] = {}
        self.stood_down = 0  # lives that were put out and came back in place
        self.events: list[object] = []
        self.history: list[str] = []
        self.last_step_wish = 0
        self.limit = 0  # batches of the data; 0: no end
        self.every = 0  # steps between checkpoints; 0: there are none
        self.disk: dict[int, Kept] = {}
        self.finite: Callable[[int, Result], bool] = lambda step, result: True
        self.infinite_flips = False  # what a flip makes of a result is not finite
        self.on_touch: Callable[[object], None] = lambda who: None
        self.on_closing: Callable[[Link], None] = lambda link: None
        self._conns = 0
        self._quiet = quiet

    def say(self, text: str) -> None:
        if not self._quiet:
            self.history.append(f"{self.now:8.3f}  {text}")

    def next_conn(self) -> int:
        self._conns += 1
        return self._conns

    def touched(self, who: object) -> None:
        """Something about `who` changed: a driver may look at its deadlines and possible actions."""
        self.on_touch(who)

    def closing(self, link: Link) -> None:
        self.on_closing(link)

    # --- making things

    def start_server(self, store: Store | None = None) -> Server:
        server = Server(self, f"c{len(self.servers)}", store or self.store)
        self.servers.append(server)
        self.say(f"{server.name} starts with term {server.term}")
        return server

    def start_life(self, name: str, initial: str = INITIAL) -> Life:
        life = Life(self, name, initial)
        self.lives.append(life)
        self.say(f"a process of {name} starts")
        return life

    def life(self, name: str) -> Life:
        """The latest living process of a replica."""
        return next(x for x in reversed(self.lives) if x.name == name and x.alive)

    @property
    def server(self) -> Server:
        """The newest coordinator that lives."""
        return next(s for s in reversed(self.servers) if s.alive)

    # --- what a connection can do next

    def deliver_up(self, link: Link) -> bool:
        server = link.server
        if not link.up or link.broken or not server.alive or link.conn not in server.links:
            return False
        message = link.up.popleft()
        if isinstance(message, Hello):
            link.server_open = True
            server.feed(MemberHello(link.conn, message))
        else:
            server.feed(MemberMessage(link.conn, message))
        return True

    def deliver_down(self, link: Link) -> bool:
        if not link.down or link.broken or not link.life_open or not link.life.alive:
            return False
        message = link.down.popleft()
        if isinstance(message, Commit) and link.conn % 2:  # this one is read as the leader of several ranks does
            message = to_leader_of_several.decode(msgspec.msgpack.encode(message))
        link.life.feed(Received(message))
        return True

    def notice_server(self, link: Link) -> None:
        """The coordinator's side sees that the connection is closed."""
        if link.server.alive and link.server.links.pop(link.conn, None) is not None:
            link.up.clear()
            if link.server_open:
                link.server_open = False
                link.server.feed(ConnectionClosed(link.conn, "connection reset"))

    def notice_life(self, link: Link) -> None:
        """The member's side sees it."""
        if link.life_open:
            link.life_open = False
            if link.life.link is link:
                link.life.link = None
                link.life.wants_link = True
                link.life.feed(Disconnected("connection reset"))


__all__ = ["NO_TERM", "Life", "Link", "Server", "Store", "Tick", "World"]
