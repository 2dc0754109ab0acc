"""The coordinator's side of the simulated cluster: its store, and the process around its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftar_core.protocol.accounting import Accounting, Saved
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.protocol.effects import (
    Close,
    CoordinatorEffect,
    Emit,
    Persist,
    Reply,
    Send,
    Stop,
)
from ftar_core.protocol.events import (
    Operator,
    RecordFailed,
)
from ftar_core.protocol.record import Claim, Record
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import EventView, OpReply, OpRequest

from .truth import Violation, balanced

if TYPE_CHECKING:
    from .link import Link
    from .world import World

SAVED_EVERY = 25  # events


class Crashed(Exception):
    """The coordinator died in the middle of a list of effects."""


@dataclass
class Store:
    """`wipe` loses everything. `broken`: writes fail (a full disk)."""

    number: int = 0
    record: Record | None = None
    fresh: bool = True
    broken: bool = False
    writes: int = 0
    saved: Saved | None = None  # the coordinator's book of where the time went

    def claim(self, coordinator: str) -> Claim:
        self.number += 1
        return Claim(term=Term(self.number, coordinator), record=self.record, fresh=self.fresh and self.record is None)

    def write(self, record: Record) -> str:
        """'ok', 'failed' or 'fenced'."""
        if record.term.number < self.number:
            return "fenced"
        if self.broken:
            return "failed"
        self.record = record
        self.writes += 1
        return "ok"

    def wipe(self) -> None:
        self.number, self.record, self.fresh, self.saved = 0, None, False, None


class Server:
    """A coordinator process. `crash_in`: it dies after so many further effects."""

    def __init__(self, world: World, name: str, store: Store) -> None:
        self.world, self.name, self.store = world, name, store
        self.claim = store.claim(name)
        gap_s = max(0.0, world.now - store.saved.mono) if store.saved is not None else 0.0
        self.book = Accounting(world.now, world.config.replicas, store.saved, gap_s, fresh=self.claim.fresh)
        self.machine = Coordinator(world.config, self.claim, world.now, self.book)
        self.links: dict[int, Link] = {}
        self.alive, self.paused = True, False
        self.crash_in: int | None = None
        self.fed = 0
        self.exit: Stop | None = None
        self.replies: list[OpReply] = []
        self.given: set[str] = set()  # incidents that operators' requests named
        self.over: set[tuple[str, str]] = set()  # (replica, incident): it was back

    @property
    def term(self) -> Term:
        return self.claim.term

    def feed(self, event: object) -> None:
        """One event, and its effects."""
        if self.alive:
            self._carry_out(self.machine.handle(event, self.world.now))  # type: ignore[arg-type]
            self._keep_book()
            self.world.touched(self)

    def _keep_book(self) -> None:
        """Now and then it is saved for the next one; every time, every moment must be in it once."""
        self.fed += 1
        if self.alive and self.fed % SAVED_EVERY == 0:
            saved = self.book.saved(self.world.now, self.world.now)
            balanced(saved.spent, self.book)
            if self.store.number == self.term.number:
                self.store.saved = saved

    def _carry_out(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            if self.crash_in is not None:
                self.crash_in -= 1
                if self.crash_in < 0:
                    self.crash("dies between two effects")
                    return
            if not self._one(effect) or not self.alive:
                return

    def _one(self, effect: CoordinatorEffect) -> bool:
        match effect:
            case Persist(record):
                before = self.store.record
                outcome = self.store.write(record)
                if outcome == "fenced":
                    self.crash("its store belongs to a newer coordinator")
                    return False
                if outcome == "failed":
                    self.world.say(f"{self.name}: record not written")
                    self._carry_out(self.machine.handle(RecordFailed("no space left"), self.world.now))
                    return False
                self.world.say(f"{self.name}: record epoch {record.epoch.id} {record.epoch.names()}")
                if before is not None and before.epoch.id != record.epoch.id:  # not just looked whether it is there
                    self._begins_again(before, record)
            case Send(conn, message):
                link = self.links.get(conn)
                if link is not None and not link.broken:
                    link.down.append(message)
            case Close(conn):
                link = self.links.pop(conn, None)
                if link is not None:
                    link.server_open = False
                    self.world.closing(link)
            case Emit(event):
                self.world.say(f"{self.name}: {event.kind} {event.object}: {event.reason}")
                self.world.events.append(event)
                self._incident_of(event)
                if event.kind.endswith(".diverged"):
                    self.world.truth.alarm(event.object if event.kind.startswith("replica") else "")
            case Reply(_, reply):
                self.replies.append(reply)
            case Stop() as stop:
                self.exit = stop
                if stop.promised is not None:
                    self.store.number = max(self.store.number, stop.promised.number)
                self.crash(f"stops ({stop.exit_code}): {stop.reason}")
                return False
        return True

    def _begins_again(self, before: Record, record: Record) -> None:
        """A record of a step that was committed already: from a checkpoint, or from the state of a shadow that was not
        passed all of it. Nobody who was in the job may be here."""
        truth, kept = self.world.truth, self.world.disk.get(record.first_step - 1)
        if record.first_step > truth.last:
            return
        lives = {(m.replica, m.incarnation) for m in record.epoch.members}
        for life in self.world.lives:
            if (life.name, life.member.incarnation) in lives and len(life.history) == record.first_step - 1:
                kept = (tuple(life.history), life.start)
        if kept is None:
            return  # where it is neither, the commits show it
        lost = {(m.replica, m.incarnation) for m in before.epoch.members}
        for life in [link.life for link in self.links.values() if link.server_open and not link.broken]:
            holds = life.alive and life.epoch is not None and len(life.history) == truth.last
            if holds and (life.name, life.member.incarnation) in lost:
                raise Violation(f"{self.name} begins again at step {record.first_step} although {life} is here")
        self.world.say(f"{self.name} begins again behind step {record.first_step - 1}, {truth.last} was the last")
        truth.rewind(record.term.number, record.first_step - 1, kept[0])

    def crash(self, why: str) -> None:
        self.world.say(f"{self.name}: {why}")
        self.alive = False
        for link in self.links.values():
            link.server_open = False
            self.world.closing(link)
        self.links.clear()

    def _incident_of(self, event: EventView) -> None:
        """An event belongs to an incident that somebody named, and not after its replica is back."""
        if not event.incident:
            return
        if event.incident not in self.given or (event.object, event.incident) in self.over:
            raise Violation(f"{event.kind} {event.object} belongs to {event.incident!r}, which it does not")
        if event.kind == "replica.joined":
            self.over.add((event.object, event.incident))

    def operate(self, op: str, replica: str = "", **options: object) -> OpReply:
        """One operator's request; its reply."""
        before = len(self.replies)
        request = OpRequest(id=before, op=op, replica=replica, reason="test", **options)  # type: ignore[arg-type]
        self.over = {(name, incident) for name, incident in self.over if incident != request.incident}
        self.given.add(request.incident)
        self.feed(Operator(conn=-1, principal="ann", request=request))
        replies = self.replies[before:]
        return replies[0] if replies else OpReply(id=before, code="none", text="no reply")
