"""The coordinator's whole state in one place, and the few verbs that every part of the machine uses on it.

What must hold together at any moment is (epoch, step, deal, last_commit_epoch): which membership reduces which step,
of which dealing, on top of which commit. It changes in two ways only: a commit moves `step` on, and an epoch change
replaces the membership. The latter is written to the record first; if that fails, `undo` restores what was before and
a timer tries again, so the machine never believes in an epoch that the record does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from ftar_core.protocol.accounting import Accounting
from ftar_core.protocol.addressing import Addressing
from ftar_core.protocol.chains import Chain, Chains
from ftar_core.protocol.config import JobConfig
from ftar_core.protocol.effects import Close, CoordinatorEffect, Emit, Persist, Send, Stop
from ftar_core.protocol.kept import Kept
from ftar_core.protocol.membership import ACTIVE, Cause, Replica, State, Table
from ftar_core.protocol.outliers import Outliers
from ftar_core.protocol.pace import Paces
from ftar_core.protocol.record import Record
from ftar_core.protocol.recovery import Basis, Standing
from ftar_core.protocol.stalls import Incident, Stalls
from ftar_core.wire.accounting import Loss
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import (
    Commit,
    Deal,
    Done,
    EpochInfo,
    EventView,
    Evicted,
    Hello,
    MemberInfo,
    Message,
    Report,
)

if TYPE_CHECKING:
    from ftar_core.protocol.divergence import Alarm, Dispute
    from ftar_core.protocol.hangs import Hang
    from ftar_core.protocol.joins import Preparation
    from ftar_core.protocol.likeness import Comparison


class Mode(str, Enum):
    STARTING = "starting"  # waiting for the first members
    RECOVERING = "recovering"  # finding out what is true: after a restart, or when all contributors vanished
    RUNNING = "running"  # also while it holds below min-replicas
    FINISHED = "finished"  # the last commit was sent
    STOPPED = "stopped"


Undo = Callable[[float], None] | None
NEVER = float("-inf")
DEALS_KEPT = 16  # steps: so far behind may be a shadow that the job goes on with
COMMITS_KEPT = 20_000  # steps; a replica that was away for longer fetches its state anew
NO_DEAL = Deal(batches={}, cursor=0)


@dataclass
class Job:
    """`out` collects the effects of the event being handled. Times are the coordinator's clock, seconds."""

    config: JobConfig
    term: Term
    table: Table
    started: float
    accounting: Accounting
    mode: Mode = Mode.STARTING
    reason: str = ""  # of the mode, for people
    # -- what is true
    epoch: EpochInfo = field(default_factory=lambda: EpochInfo(id=NO_EPOCH, members=()))
    step: int = 0  # the running step
    deal: Deal = NO_DEAL
    last_commit_epoch: EpochId = NO_EPOCH  # of step - 1
    record: Record | None = None  # as last written
    # -- about the running step
    members: dict[str, MemberInfo] = field(default_factory=dict)  # of `epoch`, by name
    done: dict[str, Done] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)  # members lost while the epoch still names them -> why
    dealt_to: tuple[MemberInfo, ...] = ()  # the membership when `deal` was made
    revoked: set[tuple[str, int]] = field(default_factory=set)  # incarnations that were put out on purpose
    condemned: set[tuple[str, int]] = field(default_factory=set)  # and of these, who may not come back in place
    commits: dict[int, EpochId] = field(default_factory=dict)  # step -> the epoch that committed it; the latest
    deals: dict[int, Deal] = field(default_factory=dict)  # step -> what was dealt behind it; the last few
    last_commit: Commit | None = None
    checkpoint_s: float = 0.0  # how often the members want a checkpoint; 0: not by time
    checkpoint_at: float = NEVER  # when one was due by time, last
    kept: Kept = field(default_factory=Kept)  # its checkpoints, for operators
    last_wish: int = 0  # the step after which all members' scripts want to end; 0 = none
    # -- plans
    next_epoch: int = 1
    preparation: Preparation | None = None
    ready: set[str] = field(default_factory=set)  # shadows that have caught up
    vacated: dict[int, tuple[str, str]] = field(default_factory=dict)  # slot -> (who had it, why it has it no more)
    spares_by: float = NEVER  # until then the start of the job waits for its spares
    promotable: frozenset[str] = frozenset()  # shadows close behind at the moment of the last loss or drain
    promote_by: float = NEVER  # until then the commit waits for one of them
    drain_by: float = NEVER  # until then a drain waits for one
    drains: set[str] = field(default_factory=set)  # asked to leave at a boundary
    forced_drains: set[str] = field(default_factory=set)  # may go below min-replicas
    finishing: str = ""  # why the next commit is the last
    failed: bool = False  # the last commit was that of a failure
    plan: str = ""  # the bucket plan everybody must have
    software: dict[str, str] = field(default_factory=dict)  # and the versions of what computes
    limit: int | None = None  # and the number of batches that the data has, 0: no end
    comparing: dict[int, Comparison] = field(default_factory=dict)  # newcomers that do not fit, by connection
    ranks: int = 0  # and the number of ranks a replica has
    # -- troubles
    hold_since: float | None = None  # below min-replicas
    hold_reason: str = ""
    hold_cause: Loss = Loss.MIN_REPLICAS  # while there is a reason
    diverged: str = ""  # unequal digests that could not be attributed: no commit until somebody is put out
    dispute: Dispute | None = None  # about the results of the running step
    alarms: dict[str, Alarm] = field(default_factory=dict)  # by replica; of the job as a whole: ""
    network_trouble: str = ""  # many silent at once
    strike_at: float = NEVER  # when many were silent for the first time
    hangs: dict[str, Hang] = field(default_factory=dict)  # hung replicas, and those evicted for it
    overdue: set[str] = field(default_factory=set)  # replicas whose phase lasts longer than its budget; said already
    withheld: set[str] = field(default_factory=set)  # would be evicted but for a guard; said already
    record_problem: str = ""
    auto_evictions: list[float] = field(default_factory=list)
    unreachable: dict[tuple[str, str], str] = field(default_factory=dict)  # dead links of this epoch -> what was said
    basis: Basis | None = None  # what is known, while recovering
    standings: dict[str, Standing] = field(default_factory=dict)  # who reported, while recovering
    unsaid: set[str] = field(default_factory=set)  # of those, who announced a result and has not sent its Done yet
    waited: bool = False  # the deadline of the recovery has passed
    waited_long: bool = False  # for recovery_wait_s: who is not back by now has hardly survived
    waited_for_all: bool = False  # for start_timeout_s: then a checkpoint is better than who may still come
    forced: bool = False  # the operator decided to go on without those who are missing
    acknowledged: set[str] = field(default_factory=set)  # members that have the last commit
    stalls: Stalls = field(default_factory=Stalls)
    paces: Paces = field(default_factory=Paces)
    outliers: Outliers = field(default_factory=Outliers)
    chains: Chains = field(default_factory=Chains)
    # -- machinery
    addressing: Addressing = field(default_factory=Addressing)
    timers: dict[str, float] = field(default_factory=dict)
    out: list[CoordinatorEffect] = field(default_factory=list)
    undo: Undo = None  # what a failed record takes back
    persisted: bool = False  # in this event

    # --- effects

    def send(self, replica: Replica, message: Message) -> None:
        """To its present connection; nothing if it has none."""
        if replica.conn is not None:
            self.out.append(Send(replica.conn, self.addressing.narrow(message, replica.name)))

    def send_to(self, name: str, message: Message) -> None:
        replica = self.table.get(name)
        if replica is not None:
            self.send(replica, message)

    def emit(self, kind: str, thing: str, reason: str, *, evidence: str = "", chain: Chain | None = None) -> None:
        """`thing` is a replica ("r1", "r1/rail0"), or else `chain` says what it belongs to, if anything."""
        event = EventView(
            seq=0, time=0.0, source="coordinator", kind=kind, object=thing, reason=reason, evidence=evidence
        )
        chain = chain or self.chains.of((thing.partition("/")[0],))
        if chain is not None:
            event = msgspec.structs.replace(
                event, incident=chain.incident, action=chain.action, injected=chain.injected
            )
        self.out.append(Emit(event))

    def close(self, replica: Replica, why: str) -> None:
        if replica.conn is not None:
            self.out.append(Close(replica.conn, why))
            self.table.detach(replica)

    def stop(self, exit_code: int, reason: str, promised: Term | None = None) -> None:
        self.mode, self.reason = Mode.STOPPED, reason
        self.timers.clear()
        self.emit("coordinator.stopped", self.config.job, reason)
        self.out.append(Stop(exit_code, reason, promised))

    def can_persist(self, now: float) -> bool:
        """One record an event, so that a failure says which; and not while the last failure is young."""
        if self.timers.get("record", 0.0) > now:
            return False
        if self.persisted:
            self.timers["again"] = now
            return False
        return True

    def persist(self, record: Record, undo: Undo) -> None:
        self.record, self.persisted, self.undo = record, True, undo
        self.out.append(Persist(record))

    # --- facts

    def mint_epoch(self, members: Iterable[MemberInfo]) -> EpochInfo:
        """A membership with the next number; numbers rise and are never used twice, not even cancelled ones."""
        number, self.next_epoch = self.next_epoch, self.next_epoch + 1
        return EpochInfo(id=EpochId(self.term, number), members=tuple(sorted(members, key=lambda m: m.slot)))

    def is_member(self, replica: Replica) -> bool:
        """In the running epoch with this incarnation, and not yet lost."""
        member = self.members.get(replica.name)
        return member is not None and member.incarnation == replica.incarnation and replica.name not in self.gone

    def contributors(self) -> list[str]:
        """Living members of the running epoch, by slot."""
        return [m.replica for m in self.epoch.members if m.replica not in self.gone]

    def draining(self) -> list[str]:
        """Members that were asked to leave, by name."""
        living = (self.table.replicas[name] for name in sorted(self.drains))
        return [r.name for r in living if r.state is State.DRAINING and self.is_member(r)]

    def committed(self, step: int, epoch: EpochId) -> None:
        """`step` is true, by the results of `epoch`, and `deal` is the one behind it; what was believed of later steps
        is not."""
        for later in [known for known in self.commits if known > step]:
            del self.commits[later]
        self.deals = {at: deal for at, deal in self.deals.items() if step - DEALS_KEPT < at < step}
        self.commits[step], self.deals[step] = epoch, self.deal
        while len(self.commits) > COMMITS_KEPT:
            del self.commits[next(iter(self.commits))]

    def of_history(self, report: Report) -> bool | None:
        """Is the state that a Hello reports (after step - 1, by the epoch that committed it) one of this job's? None if
        that is not known any more."""
        held = report.step - 1
        if held <= 0:
            return True
        if held >= self.step:
            return False  # of a history that this job has not
        if held == self.step - 1:
            return report.last_commit_epoch == self.last_commit_epoch
        known = self.commits.get(held)
        return None if known is None else known == report.last_commit_epoch

    def record_of(self, epoch: EpochInfo, step: int, deal: Deal, last_commit_epoch: EpochId) -> Record:
        return Record(
            job=self.config.job,
            term=self.term,
            epoch=epoch,
            first_step=step,
            deal=deal,
            last_commit_epoch=last_commit_epoch,
            next_incarnation=self.table.next_incarnation,
            slots=dict(self.table.slots),
            cordoned=tuple(sorted(self.table.cordoned)),
            ended=bool(self.finishing),
        )

    def rewrite_record(self, undo: Undo) -> None:
        """The same epoch with the present cordons and end wish; nothing to write before the first epoch."""
        if self.record is not None:
            changed = msgspec.structs.replace(
                self.record,
                term=self.term,
                cordoned=tuple(sorted(self.table.cordoned)),
                ended=bool(self.finishing),
                next_incarnation=self.table.next_incarnation,
            )
            self.persist(changed, undo)

    def set_epoch(self, epoch: EpochInfo) -> None:
        self.epoch = epoch
        self.members = {m.replica: m for m in epoch.members}
        self.done, self.gone, self.unreachable, self.diverged = {}, {}, {}, ""
        self.dispute = None
        self.withheld = set()
        self.timers.pop("unreachable", None)
        intervals = [r.hello.report.checkpoint_s for m in epoch.members if (r := self.table.get(m.replica)) and r.hello]
        self.checkpoint_s = min((s for s in intervals if s > 0), default=0.0)
        wishes = [self._wish(m.replica) for m in epoch.members]
        self.last_wish = max(wishes) if wishes and all(wishes) else 0

    def _wish(self, name: str) -> int:
        replica = self.table.get(name)
        return replica.last_step_wish if replica is not None else 0

    # --- losing a replica

    def lose(self, replica: Replica, why: str, now: float, loss: Loss = Loss.KILLED) -> None:
        """Its connection is gone: the process died, or the network between."""
        self.table.detach(replica)
        self._out(replica, why, now, loss)
        if replica.may(Cause.LOST):
            replica.move(Cause.LOST, now, why)
            self.emit("replica.lost", replica.name, why)

    def evict(
        self,
        replica: Replica,
        why: str,
        now: float,
        *,
        rejoin: bool,
        cause: Cause = Cause.EVICT,
        in_place: bool = False,
        evidence: str = "",
        loss: Loss = Loss.EVICTED,
    ) -> None:
        """Put this incarnation out at once. It hears why, if it can hear; nothing it says counts from now on.
        `in_place`: it was only away, and its process may come back without starting again."""
        self.revoked.add((replica.name, replica.incarnation))
        if not in_place:
            self.condemned.add((replica.name, replica.incarnation))
        self.send(replica, Evicted(term=self.term, reason=why, rejoin=rejoin, in_place=in_place))
        self._out(replica, why, now, loss)
        self.close(replica, why)
        if replica.may(cause):
            replica.move(cause, now, why)
        self.emit("replica.evicted", replica.name, why, evidence=evidence)

    def _out(self, replica: Replica, why: str, now: float, loss: Loss) -> None:
        self.ready.discard(replica.name)
        self.drains.discard(replica.name)
        self.standings.pop(replica.name, None)
        self.unsaid.discard(replica.name)
        hang = self.hangs.get(replica.name)
        if hang is not None and not hang.evicted:
            del self.hangs[replica.name]
        if self.mode is Mode.RUNNING and self.is_member(replica):
            self.gone[replica.name] = why
            detect_ms = (now - replica.quietest()[1]) * 1000 if replica.last_life else None
            self.stalls.begin(Incident(now, "replica-lost", replica.name, self.step, why, detect_ms))
            self.accounting.lost(replica.name, loss, now)

    def take_plan(self, hello: Hello) -> None:
        """What everybody's model must be like from here on."""
        self.plan, self.ranks, self.software = hello.plan, len(hello.ranks), dict(hello.software)
        self.limit = hello.report.deal.limit if hello.report.deal is not None else None

    def may_auto_evict(self, now: float) -> bool:
        """True if the limit of automatic evictions allows one more."""
        detection = self.config.detection
        if detection.max_evictions == 0:
            return True
        self.auto_evictions = [t for t in self.auto_evictions if now - t < detection.eviction_window_s]
        return len(self.auto_evictions) < detection.max_evictions

    def states(self, states: tuple[State, ...] = ACTIVE) -> list[Replica]:
        return [r for r in self.table if r.state in states]
