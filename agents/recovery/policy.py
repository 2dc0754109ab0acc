"""What happens after a replica's process ended: pure, so that every line of it can be tested with a given `now`.

The exit code says what would help (ftar_core.wire.exits): nothing (finished, wrong settings, refused), an operator
(drained), or starting again (everything else: evicted, crashed, killed, unknown). Starting again is delayed by a back-
off that doubles, because a replica that dies at once will mostly do so again, and each attempt costs its peers a new
epoch; the delay is forgotten once a life lasted `healthy_s`, because then this death has another cause than the last
one. There is no largest number of attempts: a node that comes back after an hour should find its replica still trying.

What was asked for while the process ended goes before its exit code: a training script may answer SIGTERM with any
code.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from ftar_core.wire.exits import RankExit


class Intent(str, Enum):
    """Why the process was being ended when it ended."""

    NONE = "none"  # it ended by itself, or somebody else killed it
    STOP = "stop"
    RESTART = "restart"


class Action(str, Enum):
    DONE = "done"
    FAIL = "fail"
    WAIT = "wait"  # for a rejoin
    STOPPED = "stopped"
    START = "start"  # after delay_s


@dataclass(frozen=True)
class Ending:
    """How a process ended: an exit code, or a signal, or neither (nobody was there to see it)."""

    exit_code: int | None = None
    signal: int | None = None

    def sentence(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        if self.exit_code is None:
            return "ended, and its exit status is not known"
        name = _CODES.get(self.exit_code)
        return f"exited with code {self.exit_code}" + (f" ({name})" if name else "")


@dataclass(frozen=True)
class History:
    """`failures` counts the lives before this one, in a row, that ended early. Times are seconds of one clock."""

    started: float
    failures: int = 0
    intent: Intent = Intent.NONE


@dataclass(frozen=True)
class Limits:
    backoff_s: float
    backoff_max_s: float
    healthy_s: float


@dataclass(frozen=True)
class Decision:
    action: Action
    delay_s: float
    failures: int
    sentence: str


_CODES = {
    int(RankExit.FINISHED): "finished",
    int(RankExit.USAGE): "wrong settings",
    int(RankExit.RESTART): "asks to be started again",
    int(RankExit.DRAINED): "drained",
    int(RankExit.REFUSED): "refused by the job",
    int(RankExit.FAILED): "the job has failed",
}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def backoff(failures: int, limits: Limits) -> float:
    """Seconds before the start that follows the `failures`-th early end in a row (1, 2, ...)."""
    if failures < 1:
        return 0.0
    return float(min(limits.backoff_s * 2.0 ** min(failures - 1, 60), limits.backoff_max_s))


def decide(ending: Ending, history: History, limits: Limits, now: float) -> Decision:
    """What to do about a process that ended at `now`, and the sentence why."""
    ran_s = max(0.0, now - history.started)
    how = f"{ending.sentence()} after {_span(ran_s)}"
    if history.intent is Intent.STOP:
        return Decision(Action.STOPPED, 0.0, 0, f"{how}; stopped as asked")
    if history.intent is Intent.RESTART:
        return Decision(Action.START, 0.0, 0, f"{how}; starts again as asked")
    if ending.exit_code == RankExit.FINISHED:
        return Decision(Action.DONE, 0.0, 0, f"{how}; it is not started again")
    if ending.exit_code in (RankExit.USAGE, RankExit.REFUSED, RankExit.FAILED):
        return Decision(Action.FAIL, 0.0, 0, f"{how}; starting it again would not help")
    if ending.exit_code == RankExit.DRAINED:
        return Decision(Action.WAIT, 0.0, 0, f"{how}; it waits for a rejoin")
    failures = 1 if ran_s >= limits.healthy_s else history.failures + 1
    return failed(f"{how}", failures, limits)


def failed(what: str, failures: int, limits: Limits) -> Decision:
    """The decision after the `failures`-th trouble in a row, for a process that ended early or could not be started."""
    delay_s = backoff(failures, limits)
    row = f", {failures} times in a row" if failures > 1 else ""
    return Decision(Action.START, delay_s, failures, f"{what}{row}; starts again in {_span(delay_s)}")


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
