"""The decision after a replica ended, as a table: no process, no clock."""

from __future__ import annotations

import signal

import pytest

from agents.recovery.policy import Action, Ending, History, Intent, Limits, backoff, decide
from ftar_core.wire.exits import RankExit

LIMITS = Limits(backoff_s=0.2, backoff_max_s=30.0, healthy_s=30.0)
NOW = 1000.0


def code(number: int) -> Ending:
    return Ending(exit_code=number)


@pytest.mark.parametrize(
    ("ending", "intent", "ran_s", "failures", "action", "delay_s", "failures_after", "words"),
    [
        (code(RankExit.FINISHED), Intent.NONE, 100, 0, Action.DONE, 0, 0, "finished"),
        (code(RankExit.USAGE), Intent.NONE, 1, 0, Action.FAIL, 0, 0, "wrong settings"),
        (code(RankExit.REFUSED), Intent.NONE, 1, 4, Action.FAIL, 0, 0, "refused by the job"),
        (code(RankExit.DRAINED), Intent.NONE, 100, 2, Action.WAIT, 0, 0, "waits for a rejoin"),
        (code(RankExit.RESTART), Intent.NONE, 5, 0, Action.START, 0.2, 1, "starts again in 0.2 s"),
        (code(1), Intent.NONE, 5, 1, Action.START, 0.4, 2, "2 times in a row"),
        (Ending(signal=signal.SIGKILL), Intent.NONE, 5, 3, Action.START, 1.6, 4, "killed by SIGKILL after 5.0 s"),
        (Ending(signal=signal.SIGSEGV), Intent.NONE, 5, 20, Action.START, 30.0, 21, "SIGSEGV"),
        (Ending(), Intent.NONE, 5, 0, Action.START, 0.2, 1, "exit status is not known"),
        # A long life forgets the failures before it, one just short of that does not.
        (code(1), Intent.NONE, 30, 9, Action.START, 0.2, 1, "after 30 s"),
        (code(1), Intent.NONE, 29.9, 1, Action.START, 0.4, 2, "2 times"),
        # What was asked for goes before the code.
        (code(0), Intent.STOP, 5, 3, Action.STOPPED, 0, 0, "stopped as asked"),
        (Ending(signal=signal.SIGKILL), Intent.STOP, 5, 0, Action.STOPPED, 0, 0, "SIGKILL"),
        (code(0), Intent.RESTART, 5, 3, Action.START, 0, 0, "as asked"),
        (code(RankExit.DRAINED), Intent.RESTART, 5, 0, Action.START, 0, 0, "as asked"),
        # Clocks of two processes differ by a tick: no life is shorter than nothing.
        (code(1), Intent.NONE, -0.01, 0, Action.START, 0.2, 1, "after 0.0 s"),
    ],
)
def test_table(
    ending: Ending,
    intent: Intent,
    ran_s: float,
    failures: int,
    action: Action,
    delay_s: float,
    failures_after: int,
    words: str,
) -> None:
    decision = decide(ending, History(NOW - ran_s, failures, intent), LIMITS, NOW)
    assert decision.action is action
    assert decision.delay_s == pytest.approx(delay_s)
    assert decision.failures == failures_after
    assert words in decision.sentence


def test_a_crash_loop_is_slowed_down_to_the_maximum_and_never_given_up() -> None:
    failures, delays = 0, []
    for _ in range(2000):  # far beyond what a float power could hold
        decision = decide(code(1), History(NOW - 1.0, failures), LIMITS, NOW)
        assert decision.action is Action.START
        failures = decision.failures
        delays.append(decision.delay_s)
    assert delays[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert delays == sorted(delays)
    assert delays[-1] == 30.0


def test_no_failure_no_delay() -> None:
    assert backoff(0, LIMITS) == 0.0
