"""A replica of several ranks is started, and started again, as one: what each rank's process means for the others.

A rank that ended cannot come back into a replica whose other ranks go on: their collectives with it are broken, and
the state of the model is lost with its part. So the ranks of a replica begin together, once no process of an earlier
life is left (a rank that came early would meet the store of the leader that is about to end), and those that outlive a
broken one are ended. They mostly end by themselves, and say why in their logs; ALONE_S is what they get for it.

A rank that finished or was drained breaks nothing: the others are on their way to the same end. Pure: phases in, what
to do out.

A replica whose ranks are on several nodes has an agent on each; there the ranks learn from each other: each ends when
its connection to the leader does. One that is started again before the old leader has ended meets that one, ends once
more with the code that asks for a start, and finds the new leader after its back-off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALONE_S = 2.0


@dataclass(frozen=True)
class RankNow:
    """One rank's process. At most one of these is true."""

    runs: bool = False
    wants_start: bool = False
    broken: bool = False  # it ended, or could not be started, and is to be started again
    failed: bool = False  # it ended, and starting it again would not help


@dataclass(frozen=True)
class Verdict:
    """`start`: all ranks may be started now. `end`: these ranks are to be ended, because of `why`; with `again` they
    are started again."""

    start: bool = False
    end: tuple[int, ...] = ()
    again: bool = True
    why: str = ""
    broken: bool = False  # some ranks run without the others


def judge(ranks: Mapping[int, RankNow], broken_s: float) -> Verdict:
    """`broken_s`: how long some ranks have been running without the others."""
    if len(ranks) == 1:
        return Verdict(start=all(r.wants_start for r in ranks.values()))
    running = tuple(sorted(number for number, r in ranks.items() if r.runs))
    failed = sorted(number for number, r in ranks.items() if r.failed)
    down = sorted(number for number, r in ranks.items() if r.broken or r.wants_start or r.failed)
    if not running or not down:
        return Verdict(start=all(r.wants_start for r in ranks.values()))
    if broken_s < ALONE_S:
        return Verdict(broken=True)
    first = (failed or down)[0]
    why = f"rank {first} of the replica {'failed' if failed else 'ended'}"
    return Verdict(end=running, again=not failed, why=why, broken=True)


def waits_for(ranks: Mapping[int, RankNow], rank: int) -> str:
    """Why this rank, which wants to start, is not started; empty if nothing holds it up."""
    failed = [str(number) for number, r in ranks.items() if r.failed]
    if failed:
        return f"rank {', '.join(failed)} failed, and a replica starts whole; see its log"
    others = [str(number) for number, r in ranks.items() if number != rank and not r.wants_start]
    return f"it starts together with rank {', '.join(others)}" if others else ""
