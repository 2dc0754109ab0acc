"""Plays random sequences (real_sequences.py) beside each other, each in a network namespace of its own: nearly all of
the ten seconds of one go by in waiting.

    python sequence_players.py FIRST_SEED COUNT BESIDE        a line a sequence on stdout; exit code 1 if one failed

The players are forked from a process that has harness and agent imported, and each forks a zygote of its own for its
agents (agent_zygote.py). The first failure ends the others, which clean up behind them.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from random import Random
from types import FrameType

import agent_zygote
from real_sequences import RealNode, Zygote

STEPS = 8
PR_SET_PDEATHSIG = 1
WEIGHTS = {
    "inject": 8,
    "inject and die": 3,
    "revert": 2,
    "kill agent": 1,
    "end agent": 1,
    "freeze": 1,
    "kill watchdog": 1,
    "kill controller": 1,
    "pause": 3,
    "administrator": 2,
}
ENDS_WITHIN_S = 180  # liveness only
_zygote: Zygote | None = None
_ending = False


@dataclass(frozen=True)
class Played:
    """How a sequence went. `failure`: empty, or all that a person needs."""

    seed: int
    faults: int
    seconds: float
    failure: str = ""


def play(seed: int) -> Played:
    assert _zygote is not None
    begun = time.monotonic()
    node = None
    try:
        node = RealNode(_zygote, Random(seed))
        _play(node)
    except Exception as error:  # told by its text, across processes
        done, log = ("\n  ".join(node.done), node.text()) if node else ("", "")
        told = f"SEQUENCE_SEED={seed}:\n  {done}\nthe agent's log:\n{log}\n{type(error).__name__}: {error}"
        return Played(seed, 0, time.monotonic() - begun, told)
    finally:
        if node is not None:
            node.close()
        if _ending:
            os._exit(1)
    return Played(seed, len(node.faults), time.monotonic() - begun)


def _play(node: RealNode) -> None:
    rng = node.rng
    node.start_agent()
    node.start_controller()
    for _ in range(STEPS):
        what = rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
        said = what
        if node.pid is None and what not in ("pause", "administrator", "kill controller"):
            node.start_agent()
            said = f"start agent, {what}"
        if what == "inject":
            said = node.inject()
        elif what == "inject and die":
            said = node.inject(rng.uniform(0, 0.06))
        elif what == "revert":
            said = node.revert()
        elif what == "kill agent":
            node.kill_agent()
        elif what == "end agent":
            node.end_agent()
        elif what == "freeze":
            node.freeze()
        elif what == "kill watchdog":
            node.kill_watchdog()
        elif what == "kill controller":
            node.kill_controller()
        elif what == "administrator":
            said = node.administrator()
        else:
            time.sleep(rng.uniform(0.1, 1.2))
        node.done.append(said)
        node.check()
        if rng.random() < 0.3:
            node.start_controller()
    node.done.append(node.finish())


def _become_player(parent: int) -> None:
    """Ends with whoever started it, and cleans up when it is asked to end."""
    global _zygote
    _dies_with(parent, signal.SIGTERM)
    ask_read, ask_write = os.pipe()
    tell_read, tell_write = os.pipe()
    here = os.getpid()
    pid = os.fork()
    if pid == 0:
        _dies_with(here, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # agents inherit it
        for number, source in enumerate((ask_read, tell_write)):
            os.dup2(source, number)
        os.closerange(3, 1024)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", closefd=False)
        with contextlib.suppress(BaseException):
            agent_zygote.main()
        os._exit(0)
    os.close(ask_read)
    os.close(tell_write)
    _zygote = Zygote(pid, os.fdopen(ask_write, "w"), os.fdopen(tell_read))
    signal.signal(signal.SIGTERM, _end)


def _dies_with(parent: int, number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _end(_number: int, _frame: FrameType | None) -> None:
    """What is raised here is lost where it interrupts a finalizer: `play` looks at `_ending`, and the kernel's alarm
    ends whoever waits for a sequence that never comes."""
    global _ending
    _ending = True
    signal.alarm(ENDS_WITHIN_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows is the cleaning up
    sys.exit(1)


def main() -> int:
    first, count, beside = (int(word) for word in sys.argv[1:])
    signal.signal(signal.SIGTERM, _end)
    context = multiprocessing.get_context("fork")
    faults = 0
    with context.Pool(min(beside, count), _become_player, (os.getpid(),)) as pool:
        for played in pool.imap_unordered(play, range(first, first + count)):
            if played.failure:
                print(played.failure, flush=True)
                return 1
            faults += played.faults
            print(f"sequence {played.seed}: {played.faults} faults, {played.seconds:.1f} s", flush=True)
    if not faults:
        print("not one fault was ever in force")
    return 0 if faults else 1


if __name__ == "__main__":
    sys.exit(main())
