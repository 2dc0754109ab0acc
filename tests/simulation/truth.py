"""Checkers that know nothing of the protocol: they see only what replicas commit, with which contributions.

(A) replicas that commit a step hold identical results; (B) no step is committed under two contributor sets: both fall
out of one comparison, since a result is the set of (life, batch) that went into it. (C) nobody commits or changes the
membership it reduces with while it has no coordinator. (D) a life that missed a committed step is out: nothing that is
committed later has its contribution, no two lives of a replica ever work on the same step, and an epoch's number means
one membership. (E) Nobody commits a step with other bits than the others, in its result or in the slice of the state
that is looked at, unless that was said, of it or of the job, within the last rotation. And every batch is trained
exactly once in the committed history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftar_core.wire.accounting import Spent
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import EpochInfo

ROTATION = 4  # steps in which the whole state is looked at
Contribution = tuple[str, int, int | None]  # replica, incarnation, batch (None: weight 0)
Result = frozenset[Contribution]


class Book(Protocol):
    def elapsed_us(self) -> int: ...
    def uncounted_us(self) -> int: ...


class Violation(AssertionError):
    """The protocol broke a promise."""


def balanced(spent: Sequence[Spent], book: Book) -> None:
    """Every moment of the job is counted once: what it was spent on adds up to all of it, and nothing is negative."""
    if any(entry.us < 0 or entry.count < 0 for entry in spent):
        raise Violation(f"time: less than nothing was spent: {spent}")
    counted = sum(entry.us for entry in spent)
    if counted + book.uncounted_us() != book.elapsed_us():
        raise Violation(f"time: {counted} + {book.uncounted_us()} us of {book.elapsed_us()} are counted: {spent}")


def names(result: Result) -> str:
    return "{" + ", ".join(f"{r}#{i % 1000000}:{b}" for r, i, b in sorted(result, key=str)) + "}"


@dataclass
class Truth:
    committed: dict[int, Result] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)  # batch -> step
    verdicts: dict[int, str] = field(default_factory=dict)
    epochs: dict[EpochId, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    part_until: dict[tuple[str, int], int] = field(default_factory=dict)  # life -> the last step it had a part in
    bits: dict[int, dict[tuple[int, int], set[str]]] = field(default_factory=dict)  # step -> what they look like -> who
    alarms: list[tuple[int, str]] = field(default_factory=list)  # before which step, about whom ("": the job)
    round: int = 0  # batches of an update of the parameters; 0: each step is one
    undone: set[tuple[str, int]] = field(default_factory=set)  # lives with a part in steps that count no more
    rewound: int = 0  # how often the job has begun again from a checkpoint
    term: int = 0  # of the coordinator that did so last: what one of an older term still commits is lost, too

    def commit(self, who: str, step: int, result: Result, verdict: str, connected: bool) -> None:
        """`who` applies `step`."""
        if not connected:
            raise Violation(f"C: {who} commits step {step} without a coordinator")
        known = self.committed.get(step)
        if known is None:
            self._first(step, result, verdict)
        elif known != result:
            if {c[:2] for c in known} != {c[:2] for c in result}:
                raise Violation(f"B: step {step} committed with {names(known)} and by {who} with {names(result)}")
            raise Violation(f"A: {who} holds another result of step {step}: {names(known)} / {names(result)}")
        elif self.verdicts[step] != verdict:
            raise Violation(f"A: step {step} is {self.verdicts[step]} for some and {verdict} for {who}")

    def alarm(self, who: str) -> None:
        self.alarms.append((self.last + 1, who))

    def same_bits(self, who: str, step: int, held: tuple[int, int]) -> None:
        """`who` commits `step` with these bits."""
        known = self.bits.setdefault(step, {})
        known.setdefault(held, set()).add(who)
        said = {name for at, name in self.alarms if step - ROTATION < at <= step}
        for others, names in known.items():
            if others != held and not ("" in said or who in said or names <= said):
                raise Violation(f"E: step {step} of {who} has other bits than that of {sorted(names)}; said: {said}")

    def _first(self, step: int, result: Result, verdict: str) -> None:
        if step > 1 and step - 1 not in self.committed:
            raise Violation(f"step {step} is committed, but step {step - 1} never was")
        replicas = [c[0] for c in result]
        done, more = len(self.trained), sum(batch is not None for _, _, batch in result)
        if self.round and more and done // self.round != (done + more - 1) // self.round:
            raise Violation(f"data: step {step} trains {more} batches behind {done}: over the end of an update")
        if len(set(replicas)) != len(replicas):
            raise Violation(f"D: two lives of one replica contribute to step {step}: {names(result)}")
        for replica, incarnation, batch in result:
            if (replica, incarnation) in self.undone:
                raise Violation(f"D: {replica}#{incarnation} of a history that was given up contributes to step {step}")
            before = self.part_until.get((replica, incarnation), step - 1)
            if before != step - 1:
                raise Violation(f"D: {replica}#{incarnation} was out since step {before + 1}, contributes to {step}")
            self.part_until[(replica, incarnation)] = step
            if batch is None:
                continue
            if batch in self.trained:
                raise Violation(f"data: batch {batch} trained at steps {self.trained[batch]} and {step}")
            self.trained[batch] = step
        if all(batch is None for _, _, batch in result):
            raise Violation(f"data: step {step} was committed without any data")
        self.committed[step] = result
        self.verdicts[step] = verdict

    def rewind(self, term: int, step: int, kept: Sequence[tuple[Result, str, object]]) -> None:
        """All who held more are lost: the job goes on from the state after `step` of a checkpoint, whose history is
        `kept`. What was committed behind it has not happened, and nobody who had a part in that comes back."""
        if len(kept) != step or [r for r, _, _ in kept] != [self.committed[s] for s in range(1, step + 1)]:
            raise Violation(f"A: the job begins with a checkpoint of step {step} that is not of its history")
        self.undone |= {life for life, last in self.part_until.items() if last > step}
        self.part_until = {life: last for life, last in self.part_until.items() if last <= step}
        for later in [s for s in self.committed if s > step]:
            del self.committed[later], self.verdicts[later]
        self.bits = {at: seen for at, seen in self.bits.items() if at <= step}
        self.alarms = [(at, who) for at, who in self.alarms if at <= step]
        self.trained = {batch: at for batch, at in self.trained.items() if at <= step}
        self.rewound, self.term = self.rewound + 1, term

    def change(self, who: str, step: int, connected: bool, epoch: EpochInfo) -> None:
        """`who` takes another membership for `step`."""
        lives = tuple((m.replica, m.incarnation) for m in epoch.members)
        if self.epochs.setdefault(epoch.id, lives) != lives:
            raise Violation(f"D: epoch {epoch.id} has two memberships: {self.epochs[epoch.id]} and {lives}")
        if not connected:
            raise Violation(f"C: {who} changes its epoch at step {step} without a coordinator")

    def built_on(self, who: str, mine: Sequence[object], source: Sequence[object]) -> None:
        """`who` goes on from the state it holds, with what a source has committed since."""
        if list(source[: len(mine)]) != list(mine):
            raise Violation(f"A: {who} builds on a state after step {len(mine)} that is not of this history")

    def all_dealt(self, cursor: int, waiting: set[int]) -> None:
        """At the end: what was dealt is trained, or waits in the deal, and nothing is both or neither."""
        trained = set(self.trained)
        if trained & waiting:
            raise Violation(f"data: batches {sorted(trained & waiting)} are trained and wait to be trained")
        if trained | waiting != set(range(cursor)):
            raise Violation(f"data: batches {sorted(set(range(cursor)) - trained - waiting)} were lost")

    @property
    def last(self) -> int:
        return max(self.committed, default=0)
