"""What a replica that does not contribute yet does next: one conclusion from what all its ranks say, on every rank.

Each rank catches up over its own streams, so news reaches the ranks at different times; but what they do with it may
hold collectives between them (the update clips by a global norm, a warm-up runs the sharded model), so they must do
the same, in the same order. `conclude` is that one conclusion: a pure function of the ballots of all ranks, with a
replica of one rank as the simple case. `Agreement` brings the ballots together.

Two ranks may have been given snapshots of different steps, when a step was committed between their requests. A rank
cannot go from one step to another alone, so then all ask again, at the same moment; the requests of one replica reach
their sources within milliseconds, a step takes longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum

from ftar_core.wire.team import Ballot, Front

LOOK_S = 0.2


class Do(Enum):
    """What all ranks of the replica do now."""

    CONTRIBUTE = "contribute"  # begin the step that it joins at
    LOAD = "load"  # the snapshot at the front
    REPLAY = "replay"  # the step at the front
    RESTART = "restart"  # fetch anew: the ranks cannot meet where they are
    WARM_UP = "warm-up"  # run the user's loop body once, drop the gradients
    FOLLOW = "follow"  # caught up: nothing to do until there is news
    WAIT = "wait"
    RESTORE = "restore"  # look for a checkpoint: nobody holds the job's state


def conclude(ballots: Sequence[Ballot]) -> Do:
    """By ballots of all ranks of one replica."""
    first = ballots[0]
    if first.restores:
        return Do.RESTORE
    if all(b.joins_at > 0 and b.joins_at == first.joins_at and b.step == b.joins_at - 1 for b in ballots):
        return Do.CONTRIBUTE
    fetched = [b for b in ballots if b.front is Front.SNAPSHOT]
    if fetched:
        others = [b for b in ballots if b.front is not Front.SNAPSHOT]
        if any(b.front is Front.NOTHING and not b.connected for b in others):
            return Do.WAIT  # that rank's own may still come
        same = len({b.front_step for b in fetched}) == 1
        return Do.LOAD if same and not others else Do.RESTART
    if len({b.step for b in ballots}) > 1:
        lost = any(b.front is Front.NOTHING and not b.connected for b in ballots)  # or has not heard yet what to be
        return Do.WAIT if lost else Do.RESTART
    if all(b.front is Front.STEP for b in ballots):
        return Do.REPLAY
    if any(b.front is Front.STEP or not b.connected or b.step < 0 for b in ballots):
        return Do.WAIT
    if any(b.warm_ups > 0 for b in ballots):
        return Do.WAIT if any(b.joins_at for b in ballots) else Do.WARM_UP
    return Do.FOLLOW


class Agreement:
    """Votes of this rank, and what came of them. `vote(round, ballot)` sends; `ended` says that no answer will come."""

    def __init__(self, vote: Callable[[int, Ballot], None], ended: Callable[[], bool]) -> None:
        self._vote, self._ended = vote, ended
        self._round = 1
        self._changed = threading.Condition()
        self._agreed: tuple[int, tuple[Ballot, ...]] | None = None

    def reach(self, ballot: Ballot) -> tuple[Ballot, ...]:
        """The ballots of all ranks, in the training thread; empty if the replica ends instead."""
        number = self._round
        self._vote(number, ballot)
        with self._changed:
            while self._agreed is None or self._agreed[0] != number:
                if self._ended():
                    return ()
                self._changed.wait(LOOK_S)
            self._round += 1
            return self._agreed[1]

    def agreed(self, number: int, ballots: tuple[Ballot, ...]) -> None:
        """In the control loop's thread."""
        with self._changed:
            self._agreed = (number, ballots)
            self._changed.notify_all()

    def wake(self) -> None:
        """The end has come: look at once."""
        with self._changed:
            self._changed.notify_all()
