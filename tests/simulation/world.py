"""A cluster in memory: the real Coordinator and Member machines, and the least model of everything between them.

Connections are two queues; a session contributes, reduces and applies; a store refuses lower terms. Nothing happens by
itself: every possible next thing is an action that a driver takes, a seeded one (`chaos.py`) or a test's (`hand.py`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ftar_core.protocol.accounting import Accounting, Saved
from ftar_core.protocol.config import JobConfig
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.protocol.effects import (
    ApplyCommit,
    Close,
    CoordinatorEffect,
    DiscardRing,
    Emit,
    End,
    EnterEpoch,
    FollowSources,
    MemberEffect,
    Persist,
    PrepareRing,
    Reconnect,
    Reply,
    RestoreState,
    Send,
    SendHello,
    SendOutdated,
    StandDown,
    Stop,
    Tell,
    TellParts,
)
from ftar_core.protocol.events import (
    Challenged,
    ConnectionClosed,
    Disconnected,
    Explanation,
    LeaveNow,
    MemberHello,
    MemberMessage,
    Operator,
    OutdatedSeen,
    Received,
    RecordFailed,
    Restored,
    RingReady,
    ShadowAt,
    StepReduced,
    Tick,
)
from ftar_core.protocol.member import Member
from ftar_core.protocol.record import Claim, Record
from ftar_core.wire.codec import to_leader_of_several
from ftar_core.wire.ids import NO_EPOCH, NO_TERM, EpochId, Term
from ftar_core.wire.messages import Commit, Deal, EpochInfo, EventView, Hello, MemberInfo, Message, OpReply, OpRequest

from .truth import ROTATION, Result, Truth, Violation, balanced

INITIAL = "initial state"
Kept = tuple[tuple[tuple[Result, str, EpochId], ...], Deal]  # a checkpoint: its history, and from where to deal
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


class Life:
    """One process of a replica: its Member machine, and a session that knows only what it was told."""

    def __init__(self, world: World, name: str, initial: str = INITIAL) -> None:
        self.world, self.name = world, name
        start = Deal(batches={}, cursor=0, limit=world.limit, round=world.truth.round)
        self.initial, self.start = initial, start
        self.member = Member(
            world.config.job,
            name,
            world.now,
            world.config.member_wait_s,
            initial,
            start=start,
            in_place=True,
            restores=world.every > 0,
        )
        self.looks = False  # for a checkpoint
        self.kept: tuple[int, Kept] | None = None  # a snapshot that is not on disk yet
        self.history: list[tuple[Result, str, EpochId]] = []  # of step i+1: result, verdict, committing epoch
        self.link: Link | None = None
        self.alive, self.paused = True, False
        self.exit: End | None = None
        self.epoch: EpochInfo | None = None
        self.step = 0
        self.deal: Deal | None = None
        self.contributed = False
        self.produced: tuple[int, int | None] = (0, None)  # step and batch of the retained gradients
        self.result: tuple[int, EpochId, Result] | None = None
        self.sources: tuple[MemberInfo, ...] = ()
        self.preparing: EpochInfo | None = None
        self.following = False
        self.wants_link = True
        self.flips: dict[int, int] = {}  # slices of its state that have other bits than they should -> which flip
        self.spoils = self.spoilt = 0  # and the result of its next reduction, or of its last
        self.held = (0, 0)  # what its last result and the slice of the state before it look like
        self.uploads = 0  # Progress messages so far
        self.told = -1

    def __str__(self) -> str:
        return f"{self.name}#{self.member.incarnation % 1_000_000}"

    # --- protocol

    def feed(self, event: object) -> None:
        if self.alive:
            for effect in self.member.handle(event, self.world.now):  # type: ignore[arg-type]
                self._one(effect)
                if not self.alive:
                    break
            self.world.touched(self)

    def _one(self, effect: MemberEffect) -> None:
        match effect:
            case SendHello(incarnation, report):
                hello = Hello(
                    job=self.world.config.job,
                    replica=self.name,
                    incarnation=incarnation,
                    ranks=(),
                    plan="plan",
                    report=report,
                    client_nonce=b"",
                    proof=b"",
                    last_step=self.world.last_step_wish,
                    software={"FTAR_ROTATION": str(ROTATION)},
                )
                self._tell(hello)
            case SendOutdated(promised):
                server = self.link.server if self.link is not None else None
                self.hang_up()
                if server is not None and server.alive and not server.paused:
                    server.feed(OutdatedSeen(promised))
            case Tell(message):
                self._tell(message)
            case Reconnect():
                self.hang_up()
                self.wants_link = True
            case PrepareRing(epoch):
                self.world.truth.change(str(self), self.step, self._connected(), epoch)
                self.preparing = epoch
            case DiscardRing():
                self.preparing = None
            case EnterEpoch(epoch, step, deal):
                self.world.truth.change(str(self), step, self._connected(), epoch)
                self.world.say(f"{self} enters {epoch.id} {epoch.names()} at step {step}")
                self.epoch, self.step, self.deal = epoch, step, deal
                self.contributed, self.result, self.preparing, self.looks = False, None, None, False
            case ApplyCommit(commit):
                self._apply(commit.whole())
            case RestoreState():
                self.looks = True
            case FollowSources(sources, fresh):
                self.sources, self.following, self.looks = sources, True, False
                if fresh:
                    self.world.say(f"{self} forgets the state after step {len(self.history)}")
                    self.history, self.told = [], -1
            case TellParts(step, epoch_id, rank):
                told = () if rank < 0 else (("reduced", self.held[0]), ("state", self.held[1]))
                ranks = (self.held,) if rank < 0 else ()
                self.feed(Explanation(step, epoch_id, rank, ranks, told))
            case StandDown(reason, keep):
                self.world.say(f"{self} stands down after step {len(self.history)}: {reason}")
                self.history = self.history if keep else []
                self.world.stood_down += 1
                self.epoch, self.deal, self.contributed, self.result, self.preparing = None, None, False, None, None
                self.produced, self.sources, self.following, self.told = (0, None), (), False, -1
                self.looks, self.kept = False, None
            case End() as end:
                self.world.say(f"{self} ends ({end.exit_code}): {end.reason}")
                self.exit = end
                self.die(clean=True)

    def _tell(self, message: Message) -> None:
        if self.link is not None and not self.link.broken:
            self.link.up.append(message)

    def _connected(self) -> bool:
        return self.link is not None and self.link.life_open

    def _apply(self, commit) -> None:  # type: ignore[no-untyped-def]
        assert self.result is not None, f"{self} told to apply step {commit.step} without a result"
        step, epoch, result = self.result
        assert (step, epoch) == (commit.step, commit.epoch), f"{self}: commit {commit.step} of another result"
        assert len(self.history) == step - 1, f"{self} applies step {step} to the state of {len(self.history)}"
        self.world.say(f"{self} commits step {step}: {sorted((r, b) for r, _, b in result)}")
        lost = epoch.term.number < self.world.truth.term and commit.term.number < self.world.truth.term
        if not lost:
            self.world.truth.commit(str(self), step, result, commit.verdict.value, self._connected())
            self.world.truth.same_bits(self.name, step, self.held)
        if self.spoilt and commit.verdict.value == "apply":
            self.flips.update(dict.fromkeys(range(ROTATION), self.spoilt))  # it is in every parameter now
        if not lost:
            self.world.deals[step + 1] = commit.deal
        self.history.append((result, commit.verdict.value, epoch))
        self.step, self.deal, self.contributed, self.result = step + 1, commit.deal, False, None
        deal = commit.deal
        if self.world.every and step % self.world.every == 0 and deal.left == deal.round and not lost:
            # As a session has it: what was dealt for the next step is not trained.
            there = msgspec.structs.replace(deal, batches={}, returned=deal.returned + tuple(deal.batches.values()))
            self.kept = (step, (tuple(self.history), there))

    def connect(self, server: Server) -> None:
        """A new connection; the server's challenge comes with it."""
        self.wants_link = False
        self.link = Link(self.world.next_conn(), server, self)
        server.links[self.link.conn] = self.link
        self.world.links.append(self.link)
        self.feed(Challenged(server.term))

    def hang_up(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.life_open = False
            link.down.clear()
            self.world.closing(link)

    def die(self, clean: bool = False) -> None:
        """The process is gone. Its last words get through only if it ended by itself."""
        self.alive = False
        if self.link is not None and not clean:
            self.link.up.clear()
        self.hang_up()
        self.world.touched(self)

    # --- checkpoints

    def may_write(self) -> bool:
        return self.kept is not None and self.alive and not self.paused

    def write(self) -> None:
        assert self.kept is not None
        (step, kept), self.kept = self.kept, None
        if self.world.truth.committed.get(step) == kept[0][-1][0]:
            self.world.disk[step] = kept
            self.world.say(f"{self} writes a checkpoint of step {step}")

    def may_restore(self) -> bool:
        return self.looks and self.alive and not self.paused

    def restore(self) -> None:
        self.looks = False
        step = max(self.world.disk, default=0)
        history, deal = self.world.disk.get(step, ((), self.start))
        self.history, self.flips = list(history), {}
        self.world.say(f"{self} looks for a checkpoint: step {step}")
        self.feed(Restored(step, self.initial if step == 0 else f"after {step}", deal))

    # --- session

    def may_contribute(self) -> bool:
        if self.epoch is None or self.contributed or not self.alive or self.paused:
            return False
        return len(self.history) == self.step - 1

    def contribute(self) -> None:
        assert self.epoch is not None
        assert self.deal is not None
        self.contributed = True
        dealt = self.deal.batches.get(self.name)
        # Forward and backward ran once: what is contributed again comes from the retained gradients.
        step, retained = self.produced
        batch = retained if step == self.step and retained is not None else dealt
        self.produced = (self.step, batch)
        parts = self.world.ring.setdefault((self.epoch.id, self.step), {})
        parts[self.name] = (self.name, self.member.incarnation, batch)

    def may_reduce(self) -> bool:
        if self.epoch is None or not self.contributed or self.result is not None or self.paused or not self.alive:
            return False
        parts = self.world.ring.get((self.epoch.id, self.step), {})
        return all(m.replica in parts and parts[m.replica][1] == m.incarnation for m in self.epoch.members)

    def reduce(self) -> None:
        assert self.epoch is not None
        result: Result = frozenset(self.world.ring[(self.epoch.id, self.step)].values())
        self.result = (self.step, self.epoch.id, result)
        slot = self.step % ROTATION
        self.spoilt, self.spoils = self.spoils, 0
        self.held = (
            zlib.crc32(repr((sorted(result, key=str), self.spoilt)).encode()),
            zlib.crc32(repr((self.step, self.flips.get(slot, 0))).encode()),
        )
        finite = self.world.finite(self.step, result) and not (self.spoilt and self.world.infinite_flips)
        self.feed(StepReduced(self.step, self.epoch.id, self.held[0], finite, state=self.held[1]))

    def may_follow(self) -> bool:
        """A shadow, or one that has joined and still lacks the state before its step."""
        if not self.following or not self.alive or self.paused:
            return False
        behind = self.epoch is not None and len(self.history) < self.step - 1
        return self.source() is not None and (self.epoch is None or behind)

    def source(self) -> Life | None:
        """The source that is furthest, of those that are alive and not behind."""
        wanted = self._wanted()
        there = [
            life
            for life in self.world.lives
            if life is not self
            and life.alive
            and not life.paused
            and (life.name, life.member.incarnation) in wanted
            and len(life.history) >= len(self.history)
        ]
        return max(there, key=lambda life: len(life.history), default=None)

    def _wanted(self) -> set[tuple[str, int]]:
        members = self.sources + (self.epoch.members if self.epoch is not None else ())
        return {(m.replica, m.incarnation) for m in members}

    def follow(self) -> None:
        """Fetch, or replay what is new."""
        source = self.source()
        assert source is not None
        limit = len(source.history) if self.epoch is None else self.step - 1
        # What is missing is replayed on top of what is here, and nobody compares the two.
        self.world.truth.built_on(str(self), self.history, source.history)
        if not self.history:
            self.flips = dict(source.flips)  # fetched, not replayed
        self.history = source.history[:limit]
        if len(self.history) == self.told and self.epoch is None:
            return
        self.told = len(self.history)
        epoch = self.history[-1][2] if self.history else NO_EPOCH
        self.feed(ShadowAt(len(self.history), epoch, ready=True))

    def may_give_up(self) -> bool:
        """It was told to contribute, but nobody is left from whom it could get the state before its step."""
        if self.epoch is None or not self.alive or self.paused or len(self.history) >= self.step - 1:
            return False
        wanted = self._wanted()
        return not any(
            x.alive and x is not self and (x.epoch is None or len(x.history) == x.step - 1)
            for x in self.world.lives
            if (x.name, x.member.incarnation) in wanted
        )

    def give_up(self) -> None:
        self.feed(LeaveNow("nobody is left who holds the state before its step", 75))

    def may_ready(self) -> bool:
        """The links of the prepared epoch can come up: everybody in it is alive."""
        if self.preparing is None or not self.alive or self.paused:
            return False
        there = {(x.name, x.member.incarnation) for x in self.world.lives if x.alive and not x.paused}
        return all((m.replica, m.incarnation) in there for m in self.preparing.members)

    def ready(self) -> None:
        assert self.preparing is not None
        epoch, self.preparing = self.preparing, None
        self.feed(RingReady(epoch.id))


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
