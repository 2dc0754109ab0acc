"""Drives a world by hand: everything that can happen happens in a fixed order, but for what a test holds back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ftar_core.protocol.events import Tick

from .life import Life
from .link import Link
from .server import Server
from .world import World


class Hand:
    """`frozen` names of replicas whose connections deliver nothing; `deaf`: nothing reaches them, but they are heard;
    `lazy` ones do not contribute."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.frozen: set[str] = set()
        self.deaf: set[str] = set()
        self.lazy: set[str] = set()
        self.slow: set[str] = set()  # contribute, but never hold the result
        self.unconnected: set[str] = set()  # cannot connect
        self.target: Server | None = None  # where members connect; the newest that lives by default

    def pump(self, until: Callable[[], bool] | None = None, limit: int = 20_000) -> bool:
        """Let things happen until nothing more can, or `until` is true. True if `until` came true."""
        for _ in range(limit):
            if until is not None and until():
                return True
            if not self._once():
                return until is None or until()
        raise AssertionError("the world does not come to rest")

    def _once(self) -> bool:
        return any(act() for act in self._actions())

    def _actions(self) -> Iterable[Callable[[], bool]]:
        world = self.world
        for link in list(world.links):
            if link.life.name not in self.frozen:
                yield lambda link=link: world.deliver_up(link)
                if link.life.name not in self.deaf:
                    yield lambda link=link: world.deliver_down(link)
            yield lambda link=link: self._notice(link)
        for life in list(world.lives):
            yield lambda life=life: self._live(life)
        for server in list(world.servers):
            yield lambda server=server: self._tick(server)

    def _notice(self, link: Link) -> bool:
        server = link.server
        gone_here = not link.life_open or not link.life.alive
        if server.alive and link.conn in server.links and (link.broken or (gone_here and not link.up)):
            self.world.notice_server(link)
            return True
        gone_there = link.conn not in server.links
        held = link.life.name in self.frozen | self.deaf
        if link.life.alive and link.life_open and (link.broken or (gone_there and (not link.down or held))):
            self.world.notice_life(link)
            return True
        if link.conn not in server.links and not link.life_open:
            self.world.links.remove(link)
        return False

    def _live(self, life: Life) -> bool:
        if not life.alive or life.paused:
            return False
        if life.wants_link and life.name not in self.unconnected:
            server = self.target or next((s for s in reversed(self.world.servers) if s.alive), None)
            if server is not None and server.alive:
                life.connect(server)
                return True
        if life.may_contribute() and life.name not in self.lazy:
            life.contribute()
            return True
        if life.may_reduce() and life.name not in self.slow:
            life.reduce()
            return True
        if life.may_ready():
            life.ready()
            return True
        if life.may_follow():
            before = life.told
            life.follow()
            return life.told != before
        return False

    def _tick(self, server: Server) -> bool:
        deadline = server.machine.deadline()
        if server.alive and deadline is not None and deadline <= self.world.now:
            server.feed(Tick())
            return True
        return False

    def advance(self, seconds: float) -> None:
        """Let time pass, deadline by deadline, for coordinators and members."""
        end = self.world.now + seconds
        while True:
            times = [d for s in self.world.servers if s.alive and (d := s.machine.deadline()) is not None]
            times += [d for x in self.world.lives if x.alive and (d := x.member.deadline()) is not None]
            due = min((t for t in times if t <= end), default=None)
            if due is None:
                break
            self.world.now = max(self.world.now, due)
            for server in list(self.world.servers):
                deadline = server.machine.deadline()
                if server.alive and deadline is not None and deadline <= self.world.now:
                    server.feed(Tick())
            for life in list(self.world.lives):
                deadline = life.member.deadline()
                if life.alive and deadline is not None and deadline <= self.world.now:
                    life.feed(Tick())
            self.pump()
        self.world.now = end
        self.pump()

    def kill(self, *names: str) -> None:
        for name in names:
            self.world.life(name).die()

    def break_link(self, *names: str) -> None:
        """The connection breaks; both sides notice at the next pump."""
        for name in names:
            link = self.world.life(name).link
            assert link is not None
            link.cut()
