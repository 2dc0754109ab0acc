"""The members' side of the simulated cluster: a process of a replica, with its machine and a session."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from ftar_core.protocol.effects import (
    ApplyCommit,
    DiscardRing,
    End,
    EnterEpoch,
    FollowSources,
    MemberEffect,
    PrepareRing,
    Reconnect,
    RestoreState,
    SendHello,
    SendOutdated,
    StandDown,
    Tell,
    TellParts,
)
from ftar_core.protocol.events import (
    Challenged,
    Explanation,
    LeaveNow,
    OutdatedSeen,
    Restored,
    RingReady,
    ShadowAt,
    StepReduced,
)
from ftar_core.protocol.member import Member
from ftar_core.wire.ids import NO_EPOCH, EpochId
from ftar_core.wire.messages import Deal, EpochInfo, Hello, MemberInfo, Message

from .link import Link
from .truth import ROTATION, Result

if TYPE_CHECKING:
    from .server import Server
    from .world import World

INITIAL = "initial state"
Kept = tuple[tuple[tuple[Result, str, EpochId], ...], Deal]  # a checkpoint: its history, and from where to deal


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
