"""Who is who: one entry a replica, its state from a table, its slot, and the incarnations that tell lives apart.

A replica's name outlives its processes; an incarnation is one process. Incarnations are minted here from the term, so
that none is ever minted twice although most are never written to the record: `term.number * 1_000_000 + counter`.
Where the record was lost, another store may have minted in the same term number, and a hash of the coordinator's id
is mixed in.

Transitions are a table; an illegal one is a missing row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ftar_core.protocol.events import BeatSeen
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import Hello, MemberInfo, RankInfo


class State(str, Enum):
    """What a replica is, in the operator's words."""

    STARTING = "starting"  # connected, or allowed to come, but not yet told what to do
    FETCHING = "fetching"
    REPLAYING = "replaying"
    SPARE = "spare"  # caught up: contributes from the next boundary, or stays a hot spare
    CONTRIBUTING = "contributing"
    SUSPECT = "suspect"
    HUNG = "hung"
    DRAINING = "draining"
    BLOCKED = "blocked"  # would contribute, but the job holds
    DRAINED = "drained"
    EVICTED = "evicted"
    UNREACHABLE = "unreachable"  # its connection is gone, or its peers cannot reach it


class Cause(str, Enum):
    """What moves a replica from one state to another."""

    HELLO = "hello"
    FETCH = "fetch"
    REPLAY = "replay"
    READY = "ready"
    JOIN = "join"
    SILENT = "silent"
    STUCK = "stuck"
    WELL = "well"
    HOLD = "hold"
    DRAIN = "drain"
    LEFT = "left"
    EVICT = "evict"
    LOST = "lost"
    ALLOW = "allow"


S, C = State, Cause
SHADOWS = (S.STARTING, S.FETCHING, S.REPLAYING, S.SPARE)
ACTIVE = (S.CONTRIBUTING, S.SUSPECT, S.HUNG, S.DRAINING, S.BLOCKED)
GONE = (S.DRAINED, S.EVICTED, S.UNREACHABLE)

TRANSITIONS: Mapping[tuple[State, Cause], State] = {
    # shadows: outside the ring, whatever they do
    **{(s, C.FETCH): S.FETCHING for s in SHADOWS},
    **{(s, C.REPLAY): S.REPLAYING for s in SHADOWS},
    **{(s, C.READY): S.SPARE for s in SHADOWS},
    **{(s, C.JOIN): S.CONTRIBUTING for s in SHADOWS},
    # contributors
    (S.CONTRIBUTING, C.SILENT): S.SUSPECT,
    (S.BLOCKED, C.SILENT): S.SUSPECT,
    (S.HUNG, C.SILENT): S.SUSPECT,
    (S.CONTRIBUTING, C.STUCK): S.HUNG,
    (S.SUSPECT, C.WELL): S.CONTRIBUTING,
    (S.HUNG, C.WELL): S.CONTRIBUTING,
    (S.BLOCKED, C.WELL): S.CONTRIBUTING,
    (S.CONTRIBUTING, C.HOLD): S.BLOCKED,
    (S.HUNG, C.HOLD): S.BLOCKED,
    (S.CONTRIBUTING, C.DRAIN): S.DRAINING,
    (S.SUSPECT, C.DRAIN): S.DRAINING,
    (S.HUNG, C.DRAIN): S.DRAINING,
    (S.DRAINING, C.LEFT): S.DRAINED,
    # ends of a life; what is gone may come back as a new one
    **{(s, C.LEFT): S.DRAINED for s in SHADOWS},
    **{(s, C.EVICT): S.EVICTED for s in (*SHADOWS, *ACTIVE, S.UNREACHABLE)},
    **{(s, C.LOST): S.UNREACHABLE for s in (*SHADOWS, *ACTIVE)},
    **{(s, C.HELLO): S.STARTING for s in (*SHADOWS, *GONE)},
    **{(s, C.ALLOW): S.STARTING for s in GONE},
    # the one life that comes back as itself: all contributors vanished, nothing was decided without this one
    (S.UNREACHABLE, C.JOIN): S.CONTRIBUTING,
}


class IllegalTransition(Exception):
    """A bug of ours: the table has no such row."""


@dataclass(eq=False)
class Replica:
    """One replica. Times are the coordinator's clock, seconds."""

    name: str
    state: State
    reason: str
    since: float
    incarnation: int = 0
    conn: int | None = None
    ranks: tuple[RankInfo, ...] = ()
    slot: int = -1
    step: int = 0  # the step it works on; of a shadow, the step it holds
    last_step_wish: int = 0
    holds_state: bool = True  # False from its join until it has shown that the state before its step has arrived
    hello: Hello | None = None  # the latest of the present incarnation
    unproven: bool = False  # the state that this Hello speaks of was not compared with the job's history yet
    phase: int = 0  # of the rank that has produced least, as are `produced` and `reduced`
    produced: int = 0
    reduced: int = 0
    beat_step: int = 0  # as the last heartbeat had it
    overdue: bool = False  # its phase has lasted longer than its budget
    moved_at: float = 0.0  # when its progress last changed
    phase_at: float = 0.0  # when its phase or step last did
    last_life: float = 0.0  # last message or heartbeat
    beats: bool = False  # heartbeats arrive on this connection
    quiet: tuple[int, float] | None = None  # of the ranks above 0, who was heard of last longest ago, and when
    slowest: int = 0  # the rank that has produced least
    sharing: int = 1  # so many ranks stand where that one stands
    loss: float | None = None
    step_ms: float | None = None
    backoff_s: float = 0.0  # before its next join is prepared, after trouble with the last
    not_before: float = 0.0

    def move(self, cause: Cause, now: float, reason: str) -> bool:
        """Take the transition; True if the state changed. Raises IllegalTransition."""
        new = TRANSITIONS.get((self.state, cause))
        if new is None:
            raise IllegalTransition(f"{self.name}: {cause.value} in state {self.state.value}")
        changed = new is not self.state
        if changed:
            self.since = now
        self.state, self.reason = new, reason
        return changed

    def may(self, cause: Cause) -> bool:
        return (self.state, cause) in TRANSITIONS

    def member(self) -> MemberInfo:
        """As it stands in an epoch."""
        return MemberInfo(replica=self.name, incarnation=self.incarnation, slot=self.slot, ranks=self.ranks)

    def quietest(self) -> tuple[int, float]:
        """The rank that was heard of last longest ago, and when. Any rank that is gone takes its replica with it."""
        own = (0, self.last_life)
        return own if self.quiet is None or self.last_life <= self.quiet[1] else self.quiet

    def heard(self, beat: BeatSeen, now: float) -> None:
        """A heartbeat of its leader."""
        self.last_life, self.beats = now, True
        team = beat.team
        least = beat if team is None else team
        step = least.step
        # Buckets are reduced as others produce theirs: they say nothing about this one.
        stood = (self.beat_step, self.produced, self.phase, self.slowest)
        self.slowest, self.sharing = (0, 1) if team is None else (team.least, team.sharing)
        if stood != (step, least.produced, least.phase, self.slowest):
            self.moved_at = now
            if stood[::2] != (step, least.phase):
                self.phase_at = now
        self.beat_step, self.phase, self.overdue = step, least.phase, least.overdue
        self.produced, self.reduced = least.produced, least.reduced
        if team is not None and team.quietest < len(self.ranks):
            self.quiet = (team.quietest, now - team.silent_ms / 1000)
        if not self.shadow:
            self.step = step

    @property
    def shadow(self) -> bool:
        return self.conn is not None and self.state in SHADOWS


@dataclass
class Table:
    """All replicas ever heard of in this life of the coordinator, and the slots that they had."""

    term: Term
    slots: dict[str, int] = field(default_factory=dict)  # the last slot of each replica
    cordoned: frozenset[str] = frozenset()
    replicas: dict[str, Replica] = field(default_factory=dict)
    by_conn: dict[int, Replica] = field(default_factory=dict)
    next_incarnation: int = 0
    first_incarnation: int = 0  # of this term: lower ones are of earlier lives of the coordinator

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas.values())

    def get(self, name: str) -> Replica | None:
        return self.replicas.get(name)

    def ensure(self, name: str, now: float, reason: str) -> Replica:
        replica = self.replicas.get(name)
        if replica is None:
            replica = self.replicas[name] = Replica(name, State.STARTING, reason, now, slot=self.slots.get(name, -1))
        return replica

    def attach(self, replica: Replica, conn: int, now: float) -> None:
        if replica.conn is not None:
            self.by_conn.pop(replica.conn, None)
        replica.conn, replica.last_life, replica.beats = conn, now, False
        replica.moved_at = replica.phase_at = now
        replica.overdue, replica.quiet = False, None
        self.by_conn[conn] = replica

    def detach(self, replica: Replica) -> None:
        if replica.conn is not None:
            self.by_conn.pop(replica.conn, None)
            replica.conn = None

    def mint(self) -> int:
        self.next_incarnation += 1
        return self.next_incarnation - 1

    def give_slots(self, newcomers: list[Replica], taken: set[int], wanted_slots: int = 0) -> None:
        """Each gets its old slot if that is free, else the lowest free one that no connected replica remembers; but
        rather one of the first `wanted_slots`, whoever remembers it, than one beyond.

        `taken`: slots of the contributors. A spare thus moves into the slot that a lost replica left, and the order of
        reduction stays what it was.
        """
        for replica in newcomers:
            old = self.slots.get(replica.name, -1)
            replica.slot = old if old >= 0 and old not in taken else -1
            if replica.slot >= 0:
                taken.add(old)
        wanted = [r for r in newcomers if r.slot < 0]
        if not wanted:
            return
        names = {r.name for r in wanted}
        kept = taken | {
            slot
            for name, slot in self.slots.items()
            if name not in names and (other := self.replicas.get(name)) is not None and other.conn is not None
        }
        for replica in wanted:
            slot = _lowest(kept)
            if slot >= wanted_slots > _lowest(taken):
                slot = _lowest(taken)
            replica.slot = self.slots[replica.name] = slot
            taken.add(slot)
            kept.add(slot)

    def forget_slot(self, name: str, slot: int) -> None:
        """`slot` has another owner now: `name` has no claim on it any more."""
        if self.slots.get(name) == slot:
            del self.slots[name]
            replica = self.replicas.get(name)
            if replica is not None:
                replica.slot = -1


def _lowest(taken: set[int]) -> int:
    """The lowest slot that is not taken."""
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def first_incarnation(term: Term, lost: bool) -> int:
    """Where minting starts in this term. `lost`: another store may have used the same term number."""
    start = term.number * 1_000_000 + 1
    if lost:
        digest = hashlib.blake2b(term.coordinator.encode(), digest_size=4).digest()
        start += 1000 * (1 + int.from_bytes(digest, "little") % 998)
    return start


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts r2 before r10: the order of "lowest name" and "higher id"."""
    parts: list[tuple[int, int | str]] = []
    digits = text = ""
    for char in name:
        if char.isdigit():
            if text:
                parts.append((1, text))
            digits, text = digits + char, ""
        else:
            if digits:
                parts.append((0, int(digits)))
            digits, text = "", text + char
    if digits:
        parts.append((0, int(digits)))
    if text:
        parts.append((1, text))
    return tuple(parts)
