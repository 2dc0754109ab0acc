"""Signals that come before a program can say what they mean to it wait until it can."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from agents.host.signals import HELD_BACK, held_back

CHILD = """
import signal, sys
from agents.host.signals import let_through
seen = []
sys.stdin.readline()
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda number, _: seen.append(number))
let_through()
print(sorted(seen), flush=True)
"""


@pytest.mark.parametrize("numbers", [(), HELD_BACK])
def test_a_process_is_not_ended_before_its_handlers_stand(numbers: tuple[signal.Signals, ...]) -> None:
    with held_back():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    for number in numbers:
        child.send_signal(number)
    out, _ = child.communicate("now\n", timeout=60)
    assert (child.returncode, out.strip()) == (0, str(sorted(int(n) for n in numbers)))


def test_this_process_hears_them_afterwards() -> None:
    with held_back():
        assert set(HELD_BACK) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not set(HELD_BACK) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
