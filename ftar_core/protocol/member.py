"""A replica's side of the protocol, as a pure machine: what its leader (rank 0) tells the session and the coordinator.

A member never decides anything about the job. It does a step, says `Done`, and waits; only a Commit moves it on, only
a NewEpoch or Join tells it whom to reduce with (safety C: no member goes on without a coordinator). What it adds is
memory: the highest term it has accepted (rule PROMISE: older coordinators are refused), the epoch of its last commit
(LASTEP) and the dealt set (ASSIGN), so that a coordinator that comes back can find out what is true.
"""

from __future__ import annotations

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
    Wait,
)
from ftar_core.protocol.events import (
    Challenged,
    Disconnected,
    Explanation,
    LeaveNow,
    MemberEvent,
    PeerUnreachable,
    Received,
    Restored,
    RingReady,
    ShadowAt,
    StepReduced,
    Tick,
)
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import NO_EPOCH, NO_TERM, EpochId, Term
from ftar_core.wire.messages import (
    EXPLAINED_PARTS,
    PART_NAME,
    Catchup,
    CaughtUp,
    Commit,
    Deal,
    Done,
    EpochInfo,
    Evicted,
    Explain,
    Explained,
    Hold,
    HoldsState,
    Join,
    Leaving,
    Message,
    NewEpoch,
    PartDigest,
    Prepare,
    PrepareCancel,
    Prepared,
    Progress,
    Refused,
    RelayedCommit,
    Report,
    Unreachable,
    Verdict,
    Welcome,
)

RECONNECT_FIRST_S = 0.1  # a restarted coordinator should be found quickly
RECONNECT_MAX_S = 1.0
REFUSED_RETRY_S = 1.0


class Member:
    """One life of a replica. `initial_digest` names the state it was initialised with, before step 1; empty: it has
    none. `start`: from where batches are to be dealt, if the job begins with this state. `restores`: it looks for a
    checkpoint before it says that it holds a state, if the coordinator knows nobody who does. `checkpoint_s`: how often
    it wants one written, by time (0: not by time).

    `coordinator_wait_s`: how long it waits for a lost coordinator before it ends (Welcome may change it). `in_place`:
    the session can stand down and come back as a shadow within the same process; if not, it ends and starts again.
    """

    def __init__(
        self,
        job: str,
        replica: str,
        now: float,
        coordinator_wait_s: float = 600.0,
        initial_digest: str = "",
        *,
        start: Deal | None = None,
        in_place: bool = False,
        restores: bool = False,
        checkpoint_s: float = 0.0,
    ) -> None:
        self._checkpoint_s = checkpoint_s
        self._in_place = in_place
        self._restores, self._restoring = restores, False
        self.job = job
        self.replica = replica
        self.initial_digest = initial_digest
        self.coordinator_wait_s = coordinator_wait_s
        self.incarnation = 0
        self.promised: Term = NO_TERM
        self.first_step = 1  # of the state that it began with
        self.step = 1 if initial_digest and not restores else 0  # all before it are committed here; 0: holds no state
        self.epoch: EpochInfo | None = None
        self._deal: Deal | RelayedCommit | None = start
        self.last_commit_epoch: EpochId = NO_EPOCH
        self.done: Done | None = None
        self.shadow = False
        self.ended = False
        self._shadow_step = -1  # the last step whose state a shadow holds
        self._shadow_epoch: EpochId = NO_EPOCH  # and the epoch that committed it
        self._shadow_ready = False
        self._state_there = True  # False between a Join and the arrival of the state before its step
        self._prepared: EpochInfo | None = None
        self._connected = False
        self._alone_since: float | None = now
        self._reconnect_s = RECONNECT_FIRST_S

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        """What the session is to do, in order. After End, nothing more comes."""
        if self.ended:
            return []
        match event:
            case Received(message):
                return self._received(message, now)
            case Challenged(term):
                return self._challenged(term)
            case Disconnected(why):
                return self._disconnected(why, now)
            case StepReduced():
                return self._reduced(event)
            case RingReady(epoch):
                if self._prepared is not None and self._prepared.id == epoch:
                    return [Tell(Prepared(epoch=epoch))]
            case ShadowAt():
                return self._shadow_at(event)
            case Restored():
                return self._restored(event)
            case PeerUnreachable(peer, epoch, reason):
                if self.epoch is not None and self.epoch.id == epoch:
                    return [Tell(Unreachable(peer=peer, epoch=epoch, reason=reason))]
            case Explanation(step, epoch, rank, ranks, parts):
                named = tuple(PartDigest(name=n[:PART_NAME], digest=d) for n, d in parts[:EXPLAINED_PARTS])
                return [Tell(Explained(step=step, epoch=epoch, rank=rank, ranks=ranks, parts=named))]
            case LeaveNow(reason, exit_code):
                return [Tell(Leaving(reason=reason)), *self._end(exit_code, reason)]
            case Tick():
                return self._tick(now)
        return []

    @property
    def deal(self) -> Deal | None:
        """Of the step it is working on; read when somebody asks."""
        if isinstance(self._deal, RelayedCommit):
            self._deal = self._deal.whole().deal
        return self._deal

    def deadline(self) -> float | None:
        """When to feed `Tick` at the latest; None: never."""
        return None if self.ended or self._alone_since is None else self._alone_since + self.coordinator_wait_s

    def report(self) -> Report:
        """Where this member stands, for the next Hello."""
        if self.shadow:
            step, epoch = self._shadow_step + 1, self._shadow_epoch
            return Report(step=step, last_commit_epoch=epoch, promised=self.promised, checkpoint_s=self._checkpoint_s)
        return Report(
            step=self.step if self._state_there else 0,
            epoch=self.epoch.id if self.epoch is not None else NO_EPOCH,
            members=self.epoch.names() if self.epoch is not None else (),
            incarnations=tuple(m.incarnation for m in self.epoch.members) if self.epoch is not None else (),
            done=self.done is not None,
            last_commit_epoch=self.last_commit_epoch,
            promised=self.promised,
            deal=self.deal,
            state_digest=self.initial_digest if self.step == self.first_step else "",
            checkpoint_s=self._checkpoint_s,
        )

    # --- the connection

    def _challenged(self, term: Term) -> list[MemberEffect]:
        if term < self.promised:
            return [SendOutdated(self.promised), self._again()]
        self.promised = term
        return [SendHello(self.incarnation, self.report())]

    def _disconnected(self, why: str, now: float) -> list[MemberEffect]:
        self._connected = False
        if self._alone_since is None:
            self._alone_since = now
        left_s = self._alone_since + self.coordinator_wait_s - now
        if left_s <= 0:
            return self._tick(now)
        return [self._again(), Wait(f"no coordinator ({why}); waiting up to {left_s:.0f} s more")]

    def _again(self) -> Reconnect:
        delay_s, self._reconnect_s = self._reconnect_s, min(RECONNECT_MAX_S, self._reconnect_s * 2)
        return Reconnect(delay_s)

    def _tick(self, now: float) -> list[MemberEffect]:
        if self._alone_since is None or now < self._alone_since + self.coordinator_wait_s:
            return []
        return self._end(RankExit.RESTART, f"no coordinator for {self.coordinator_wait_s:g} s")

    def _end(self, exit_code: int, reason: str) -> list[MemberEffect]:
        self.ended = True
        return [End(int(exit_code), reason)]

    def _leave(self, reason: str) -> list[MemberEffect]:
        """What the coordinator says cannot be true of this member: end, and come back as a new life."""
        return [Tell(Leaving(reason=reason)), *self._end(RankExit.RESTART, reason)]

    # --- from the coordinator

    def _received(self, message: Message, now: float) -> list[MemberEffect]:
        term = getattr(message, "term", None)
        if isinstance(term, Term):
            if term < self.promised:
                return []  # of a coordinator that has been replaced
            self.promised = term
        match message:
            case Commit() | RelayedCommit():
                return self._commit(message)
            case Welcome():
                return self._welcomed(message)
            case Refused(reason=reason, retry=retry, hint=hint):
                if retry:
                    return [Reconnect(REFUSED_RETRY_S), Wait(f"the coordinator refused: {reason}")]
                text = f"the coordinator refused: {reason}" + (f" ({hint})" if hint else "")
                return self._end(RankExit.REFUSED, text)
            case Evicted(reason=reason, rejoin=True, in_place=True) if self._in_place:
                return self._stand_down(reason)
            case Evicted(reason=reason, rejoin=rejoin):
                return self._end(RankExit.RESTART if rejoin else RankExit.DRAINED, reason)
            case Hold(reason=reason, restore=True) if self._may_restore():
                self._restoring = True
                return [Wait(reason), RestoreState()]
            case Hold(reason=reason):
                return [Wait(reason)]
            case NewEpoch():
                return self._new_epoch(message)
            case Join():
                return self._join(message)
            case Catchup():
                return self._catchup(message)
            case Explain(step=step, epoch=epoch_id, rank=rank):
                done = self.done
                if done is not None and (done.step, done.epoch) == (step, epoch_id):
                    return [TellParts(step, epoch_id, rank)]
            case Prepare(epoch=epoch):
                if self._older(epoch.id):
                    return []
                discard = self._discard()
                self._prepared = epoch
                return [*discard, PrepareRing(epoch)]
            case PrepareCancel(epoch=epoch_id):
                if self._prepared is not None and self._prepared.id == epoch_id:
                    return self._discard()
        return []

    def _welcomed(self, message: Welcome) -> list[MemberEffect]:
        """In. The result that the old connection may have swallowed is told again; it carries the verdict."""
        self._connected, self._alone_since = True, None
        self._reconnect_s = RECONNECT_FIRST_S
        self.incarnation = message.incarnation
        self.coordinator_wait_s = message.coordinator_wait_s
        if self.done is not None:
            return [Tell(self.done)]
        return []

    def _discard(self) -> list[MemberEffect]:
        prepared, self._prepared = self._prepared, None
        return [] if prepared is None else [DiscardRing(prepared.id)]

    def _adopt(self, epoch: EpochInfo) -> list[MemberEffect]:
        """`epoch` is in force; a ring prepared for another one is of no use any more."""
        discard: list[MemberEffect] = []
        if self._prepared is not None:
            if self._prepared.id != epoch.id:
                discard = self._discard()
            self._prepared = None
        self.epoch, self.done = epoch, None
        return discard

    def _is_in(self, epoch: EpochInfo) -> bool:
        return any(m.replica == self.replica and m.incarnation == self.incarnation for m in epoch.members)

    def _older(self, epoch: EpochId) -> bool:
        """Not newer than what this member is in: late or repeated."""
        return self.epoch is not None and epoch <= self.epoch.id

    def _commit(self, message: Commit | RelayedCommit) -> list[MemberEffect]:
        if self.shadow or message.step < self.step:
            return []
        done = self.done
        if message.step > self.step or done is None or done.epoch != message.epoch:
            where = f"step {self.step}" + ("" if done is None else f", reduced in epoch {done.epoch}")
            return self._leave(f"told to commit step {message.step} of epoch {message.epoch}, but is at {where}")
        effects: list[MemberEffect] = [ApplyCommit(message)]
        self.step, self.last_commit_epoch = message.step + 1, message.epoch
        self._deal, self.done = message.deal if isinstance(message, Commit) else message, None
        if message.verdict is Verdict.FAIL:
            reason = f"the gradients of step {message.step} were not finite, and the job was told to fail then"
            return [*effects, Tell(Leaving(reason=reason)), *self._end(RankExit.FAILED, reason)]
        if message.last:
            reason = f"step {message.step} was the last"
            return [*effects, Tell(Leaving(reason=reason)), *self._end(RankExit.FINISHED, reason)]
        if self.replica in message.drained:
            return [*effects, *self._end(RankExit.DRAINED, f"drained behind step {message.step}")]
        following = message.next
        if following is not None and not self._older(following.id):
            effects += self._adopt(following)
            effects.append(EnterEpoch(following, self.step, message.whole().deal, False, message.epoch))
        return effects

    def _new_epoch(self, message: NewEpoch) -> list[MemberEffect]:
        if self.shadow or self._older(message.epoch.id) or not self._is_in(message.epoch):
            return []
        if message.step != self.step:
            return self._leave(f"told to reduce step {message.step} again, but is at step {self.step}")
        effects = self._adopt(message.epoch)
        self._deal = message.deal
        return [*effects, EnterEpoch(message.epoch, message.step, message.deal, True, message.last_commit_epoch)]

    def _join(self, message: Join) -> list[MemberEffect]:
        if self._older(message.epoch.id) or not self._is_in(message.epoch):
            return []
        if not self.shadow and message.step != self.step:
            return self._leave(f"told to join at step {message.step}, but is at step {self.step}")
        effects = self._adopt(message.epoch)
        if self.shadow:
            self._state_there = self._shadow_step == message.step - 1
        self.shadow = False
        self.step, self._deal, self.last_commit_epoch = message.step, message.deal, message.last_commit_epoch
        return [*effects, EnterEpoch(message.epoch, message.step, message.deal, False, message.last_commit_epoch)]

    def _stand_down(self, reason: str) -> list[MemberEffect]:
        """Out, and alive (it was frozen, or cut off): nothing of this life counts any more, neither its incarnation nor
        its epoch nor a result that nobody committed. What stays is the state after the last commit that it was told of,
        with the epoch of that commit, by which the coordinator knows whether it is of the job's history."""
        effects = self._discard()
        if not self.shadow:
            held = self.epoch is not None and self._state_there
            self._shadow_step = self.step - 1 if held else -1
            self._shadow_epoch = self.last_commit_epoch if held else NO_EPOCH
        self.shadow, self._shadow_ready, self._state_there = True, False, True
        self.incarnation, self.epoch, self._deal, self.done = 0, None, None, None
        keep = self._shadow_step >= 0
        return [*effects, StandDown(reason, keep), Wait(f"put out ({reason}); coming back in place"), self._again()]

    def _catchup(self, message: Catchup) -> list[MemberEffect]:
        if self.epoch is not None:
            return []  # late: it contributes already
        self.shadow, self._restoring = True, False
        if message.fresh:
            self._shadow_step, self._shadow_epoch, self._shadow_ready = -1, NO_EPOCH, False
        # A coordinator that came back does not know yet how far this shadow is.
        ready: list[MemberEffect] = [Tell(CaughtUp(step=self._shadow_step))] if self._shadow_ready else []
        return [FollowSources(message.sources, message.fresh, message.mbit), *ready]

    # --- from the session

    def _may_restore(self) -> bool:
        """It holds nothing, and nobody has told it whom to follow. (One that did follow somebody, and was put out when
        he was lost, is in the same place.)"""
        nothing = self._shadow_step < 0 if self.shadow else self.step == 0
        return self._restores and not self._restoring and self.epoch is None and nothing

    def _restored(self, event: Restored) -> list[MemberEffect]:
        """Say so, unless the job has begun without it meanwhile: then it fetches what it lacks."""
        if not self._restoring or self.epoch is not None:
            return []
        self._restores = self._restoring = self.shadow = False
        self.step = self.first_step = event.step + 1
        self.initial_digest, self._deal = event.digest, event.deal
        return [Tell(HoldsState(report=self.report()))]

    def _reduced(self, event: StepReduced) -> list[MemberEffect]:
        """Late results of an epoch that is over, or of a step that is not running, say nothing."""
        if self.shadow or self.epoch is None or event.epoch != self.epoch.id or event.step != self.step:
            return []
        if self.done is not None:
            return []
        self._state_there = True
        self.done = Done(
            step=event.step,
            epoch=event.epoch,
            digest=event.digest,
            finite=event.finite,
            own_finite=event.own_finite,
            loss=event.loss,
            step_ms=event.step_ms,
            produced_at=event.produced_at,
            wait_ms=event.wait_ms,
            slow_rank=event.slow_rank,
            state=event.state,
            norm=event.norm,
        )
        return [Tell(self.done)]

    def _shadow_at(self, event: ShadowAt) -> list[MemberEffect]:
        self._shadow_step, self._shadow_epoch = event.step, event.last_commit_epoch
        self._shadow_ready = event.ready
        if not self.shadow:
            if event.step < self.step - 1:
                return []
            self._state_there = True
            return [Tell(CaughtUp(step=event.step))]  # until now the others could not count on this member
        if event.ready:
            return [Tell(CaughtUp(step=event.step))]
        state = "replaying" if event.step > 0 else "fetching"
        return [Tell(Progress(state=state, step=max(0, event.step), text=event.text, notice=event.notice))]
