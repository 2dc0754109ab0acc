"""Rank 0 of a replica of several: the member's control loop, its orders fanned out to all ranks.

`TeamLeader` stands where a replica of one rank has its `MemberRuntime`, and contains one. It is that runtime's
delegate: each order goes to the other ranks first and then to this one, all in the loop's thread, so that every rank
carries out the same orders in the same sequence. Reports come back through the pure machine in team.py.

The job begins when all ranks are here (assembly.py): `start` blocks until then, as `init_process_group` does. A
connection that breaks is a rank that is gone, and the replica ends with it.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from ftar_core.native import core
from ftar_core.protocol.effects import ApplyCommit, EnterEpoch, FollowSources, StandDown, TellParts
from ftar_core.protocol.events import Explanation, MemberEvent
from ftar_core.runtime.assembly import Assembly, TeamRank
from ftar_core.runtime.connection import MemberMachine, MemberRuntime
from ftar_core.runtime.pulse import Pulse
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts, Team, event_of, joint_hash
from ftar_core.wire.address import Address
from ftar_core.wire.codec import encode
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import rank_interval_ms
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import CheckpointNotice, EpochInfo, Message, Outline, RailNotice, RankInfo, RelayedCommit
from ftar_core.wire.team import (
    Agreed,
    Ballot,
    Call,
    CommitOrder,
    DiscardOrder,
    EndOrder,
    EnterOrder,
    ExplainOrder,
    FollowOrder,
    PrepareOrder,
    RankHello,
    RankReduced,
    RelayOrder,
    ToLeader,
    Vote,
    WaitOrder,
    Welcomed,
)

log = logging.getLogger("ftar.team")

FEW, GATHER_S = 16, 0.0005
FAREWELL_S = 1.0
_Receivers = tuple[list[tuple[int, TeamRank]], list[int]]  # ranks with their numbers, descriptors that take bytes now


class RankDelegate(Protocol):
    """What a rank's session does for its replica. As MemberDelegate: called in the control loop's thread."""

    def outline(self) -> Outline: ...

    def welcomed(
        self, cookie: bytes, heartbeat_host: str, heartbeat_port: int, interval_ms: int, incarnation: int
    ) -> None: ...
    def prepare_ring(self, epoch: EpochInfo) -> None: ...
    def discard_ring(self, epoch: EpochId) -> None: ...
    def enter_epoch(self, order: EnterEpoch) -> None: ...
    def apply_commit(self, order: ApplyCommit) -> None: ...
    def follow_sources(self, order: FollowSources) -> None: ...
    def tell_parts(self, order: TellParts) -> None: ...
    def restore(self) -> None: ...
    def waiting(self, reason: str) -> None: ...
    def end(self, exit_code: int, reason: str) -> None: ...
    def called(self, number: int) -> None:
        """The others wait for this rank's vote."""

    def agreed(self, number: int, ballots: tuple[Ballot, ...]) -> None: ...


class TeamLeader:
    """`publish` tells the other ranks the address at which this one listens. `machine` makes the member machine from
    the hash of the initial state of all ranks. `pulse`: this rank's heartbeats, in which those of the others are summed
    up. `extra` as for MemberRuntime.

    Raises from `start` NotAssembled for ranks that do not come, SettingsError for ranks that do not fit together."""

    def __init__(
        self,
        settings: Settings,
        delegate: RankDelegate,
        machine: Callable[[str], MemberMachine],
        *,
        info: RankInfo,
        facts: RankFacts,
        publish: Callable[[Address], None],
        pulse: Pulse | None = None,
        extra: Sequence[tuple[int, Callable[[], None]]] = (),
    ) -> None:
        self._settings, self._delegate, self._machine = settings, delegate, machine
        self._pulse = pulse
        self._bound = ""
        self._info, self._facts = info, facts
        self._publish = publish
        self._extra = extra
        self._selector = selectors.DefaultSelector()
        self._team = Team(settings.world_size)
        self._ranks: dict[int, TeamRank] = {}
        self._runtime: MemberRuntime | None = None
        self._receivers: _Receivers | None = None  # of an order to all
        self._ended = False

    # --- for the session, from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        assembly = Assembly(self._settings, self._facts, self._selector, self._ready)
        self._ranks = assembly.ranks
        self._bound = assembly.gather(self._publish)
        states = [self._facts.state, *(self._ranks[rank].hello.state for rank in sorted(self._ranks))]
        self._runtime = MemberRuntime(
            self._settings,
            self,
            self._machine(joint_hash(states) if all(states) else ""),
            extra=[*self._extra, (self._selector.fileno(), self._turn)],
        )
        self._runtime.start()

    def post(self, event: MemberEvent) -> None:
        """What this rank has to report."""
        if self._runtime is not None:
            self._runtime.call(lambda: self._heard(0, event))

    def tell(self, message: Message) -> None:
        if self._runtime is not None:
            self._runtime.tell(message)

    def vote(self, number: int, ballot: Ballot) -> None:
        if self._runtime is not None:
            self._runtime.call(lambda: self._voted(0, number, ballot))

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
        self._receivers = None
        for rank in self._ranks.values():
            if not rank.gone and rank.channel.pending_bytes:
                rank.channel.sock.settimeout(FAREWELL_S)
                rank.channel.flush()
            rank.channel.close()
        self._selector.close()

    # --- what the ranks say, in the loop's thread (before that, in `start`) ------------------------------------------

    def _turn(self) -> None:
        if self._team.unreported > FEW:
            # Hundreds report at the end of a step, one by one: woken for each, this thread would take the interpreter
            # from the training thread as often. The last few are read as they come.
            time.sleep(GATHER_S)
        for key, mask in self._selector.select(0):
            key.data(mask)

    def _ready(self, number: int, mask: int) -> None:
        rank = self._ranks.get(number)
        if rank is None or rank.gone:
            return
        if mask & selectors.EVENT_WRITE:
            self._receivers = None
            rank.channel.flush()
            self._watch(number, rank)
        if mask & selectors.EVENT_READ:
            for message in rank.channel.receive():
                self._arrived(number, message)
        if rank.channel.broken:
            self._lost(number, rank)

    def _arrived(self, number: int, message: ToLeader) -> None:
        match message:
            case RankReduced():
                self._told(self._team.reduced(number, message))
            case Vote(round, ballot):
                self._voted(number, round, ballot)
            case RailNotice() | CheckpointNotice():
                self.tell(message)
            case RankHello():
                self._ranks[number].channel.broken = "a second hello"
            case _:
                self._heard(number, event_of(message))

    def _heard(self, number: int, event: MemberEvent) -> None:
        if self._runtime is not None:
            self._told(self._team.heard(number, event))

    def _told(self, events: Sequence[MemberEvent]) -> None:
        runtime = self._runtime
        if runtime is not None:
            for event in events:
                runtime.post(event)

    def _voted(self, number: int, round_: int, ballot: Ballot) -> None:
        answer = self._team.voted(number, round_, ballot)
        if isinstance(answer, Agreed):
            self._order(answer)
            self._delegate.agreed(answer.round, answer.ballots)
        elif isinstance(answer, Call):
            self._order(answer)
            self._delegate.called(answer.round)

    def _lost(self, number: int, rank: TeamRank) -> None:
        rank.gone = True
        self._receivers = None
        self._selector.unregister(rank.channel.sock)
        why = rank.channel.broken
        rank.channel.close()
        if self._ended:
            return
        if self._runtime is None:  # it may come again: the job has not begun
            del self._ranks[number]
            return
        log.warning("%s: rank %d is gone: %s", self._settings.replica, number, why)
        for told in self._team.lost(number, why):
            self._runtime.post(told)

    # --- orders to the ranks ----------------------------------------------------------------------------------------

    def _order(self, message: Message) -> None:
        """The same for all: encoded once, and handed to the kernel in one call. At every commit there may be hundreds:
        one by one the interpreter would take as long as the sockets."""
        frame = encode(message)
        here, sockets = self._receivers or self._all_here()
        rest = core.fan_out(sockets, frame)
        if rest:
            self._receivers = None
        for place, taken in rest:
            number, rank = here[place]
            rank.channel.send_rest(frame, taken)
            self._watch(number, rank)

    def _all_here(self) -> _Receivers:
        """Looked up again when a rank is gone or its buffer was full: hundreds of objects are not touched for it at
        every commit, when all else has had the caches meanwhile."""
        here = [(number, rank) for number, rank in self._ranks.items() if not rank.gone]
        self._receivers = here, [rank.channel.clear for _, rank in here]
        return self._receivers

    def _order_each(self, message: Callable[[int], Message]) -> None:
        """To every rank what its ring needs: the addresses of all ranks would be too much for each."""
        for number, rank in self._ranks.items():
            if not rank.gone:
                self._send(number, rank, encode(message(number)))

    def _send(self, number: int, rank: TeamRank, frame: bytes) -> None:
        self._receivers = None
        channel = rank.channel
        waited = channel.pending_bytes
        channel.send_frame(frame)
        if channel.broken or channel.pending_bytes or waited:
            self._watch(number, rank)

    def _watch(self, number: int, rank: TeamRank) -> None:
        if rank.channel.broken:
            if self._runtime is not None:  # later, not in the middle of the machine's effects
                self._runtime.call(lambda: None if rank.gone else self._lost(number, rank))
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.channel.pending_bytes else 0)
        if self._selector.get_key(rank.channel.sock).events != mask:
            self._selector.modify(rank.channel.sock, mask, lambda ready: self._ready(number, ready))

    # --- MemberDelegate ---------------------------------------------------------------------------------------------

    def describe(self) -> tuple[tuple[RankInfo, ...], str, int]:
        hellos = [self._ranks[rank].hello for rank in sorted(self._ranks)]
        plan = joint_hash([self._facts.plan, *(hello.plan for hello in hellos)])
        return (self._info, *(hello.info for hello in hellos)), plan, self._facts.last_step

    def outline(self) -> Outline:
        """Of this rank's part of the model, and what plans the others have."""
        plans = [self._facts.plan, *(self._ranks[rank].hello.plan for rank in sorted(self._ranks))]
        return Outline(plans=tuple(plans), parameters=self._delegate.outline().parameters)

    def welcomed(
        self, cookie: bytes, heartbeat_host: str, heartbeat_port: int, interval_ms: int, incarnation: int
    ) -> None:
        self._delegate.welcomed(cookie, heartbeat_host, heartbeat_port, interval_ms, incarnation)
        ranks = self._settings.world_size
        gathered = self._pulse.gather(self._bound, ranks) if self._pulse is not None else None
        if gathered is None and self._pulse is not None:
            log.warning("heartbeats of the other ranks cannot be received at %s: only a death is noticed", self._bound)
        port, its_cookie = gathered or (0, b"")
        self._order(
            Welcomed(
                cookie=its_cookie,
                port=port,
                interval_ms=rank_interval_ms(interval_ms, ranks),
                incarnation=incarnation,
            )
        )

    def prepare_ring(self, epoch: EpochInfo) -> None:
        self._team.prepared(epoch.id)
        self._order_each(lambda rank: PrepareOrder(epoch=epoch.ring_of(rank)))
        self._delegate.prepare_ring(epoch)

    def discard_ring(self, epoch: EpochId) -> None:
        self._team.discarded(epoch)
        self._order(DiscardOrder(epoch=epoch))
        self._delegate.discard_ring(epoch)

    def enter_epoch(self, order: EnterEpoch) -> None:
        self._team.entered(order.epoch.id, order.step)
        self._order_each(
            lambda rank: EnterOrder(
                epoch=order.epoch.ring_of(rank),
                step=order.step,
                deal=order.deal,
                retry=order.retry,
                last_commit_epoch=order.last_commit_epoch,
            )
        )
        self._delegate.enter_epoch(order)

    def apply_commit(self, order: ApplyCommit) -> None:
        self._team.committed(order.commit.step)
        commit, loss = order.commit, self._team.mean_loss
        if commit.next is not None:
            commit = msgspec.structs.replace(commit, next=None)  # the epoch comes with an order of its own
        if isinstance(commit, RelayedCommit):
            self._order(RelayOrder(commit=commit, loss=loss))
        else:
            self._order(CommitOrder(commit=commit, loss=loss))
        os.sched_yield()  # whoever shares this core and has a commit to hand on goes first; else nothing happens
        self._delegate.apply_commit(replace(order, commit=order.commit.whole(), loss=loss))

    def follow_sources(self, order: FollowSources) -> None:
        order = replace(order, mbit=order.mbit / self._settings.world_size)
        self._order_each(
            lambda rank: FollowOrder(
                sources=tuple(source.only(rank) for source in order.sources), fresh=order.fresh, mbit=order.mbit
            )
        )
        self._delegate.follow_sources(order)

    def stand_down(self, order: StandDown) -> None:
        """The other ranks may be in the middle of a collective of the void step: a replica of several ranks has to
        start again whole (its member machine does not stand down)."""
        self.end(RankExit.RESTART, order.reason)

    def tell_parts(self, order: TellParts) -> None:
        if order.rank == 0:
            self._delegate.tell_parts(order)
        elif order.rank < 0:
            ranks = self._team.digests(order.step, order.epoch)
            self._told([Explanation(order.step, order.epoch, -1, ranks)])
        else:
            rank = self._ranks.get(order.rank)
            if rank is not None and not rank.gone:
                self._send(order.rank, rank, encode(ExplainOrder(step=order.step, epoch=order.epoch)))

    def restore(self) -> None:
        """The other ranks learn it from this one's ballot."""
        self._delegate.restore()

    def waiting(self, reason: str) -> None:
        self._order(WaitOrder(reason=reason))
        self._delegate.waiting(reason)

    def end(self, exit_code: int, reason: str) -> None:
        self._ended = True
        self._order(EndOrder(exit_code=exit_code, reason=reason))
        self._delegate.end(exit_code, reason)
