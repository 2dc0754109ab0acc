"""What faults on processes share: finding those that are meant, and holding them still.

A process is named by pid and start time in every record, so that a signal never reaches a later process of the same
number (agents/host/processes.py).
"""

from __future__ import annotations

import os
import signal
import time

import msgspec

from agents.faults.contract import Fault, Probe, Refusal, Target
from agents.faults.nics import HELPER_HINT
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.processes import may_signal, send_to, state_of
from agents.host.workers import Worker, aimed_at

STOPPED = "Tt"
STOPS_WITHIN_S = 0.5  # a thread notices the signal when it is next scheduled


def targets(machine: Machine, target: Target) -> tuple[Worker, ...]:
    return aimed_at(machine.workers.all(), target.replica, target.rank)


def refusal(machine: Machine, target: Target) -> Refusal | None:
    """None if the replica has such processes here, and none of them is this process or its parent."""
    found = targets(machine, target)
    if not found:
        known = ", ".join(sorted({f"{w.replica} rank {w.rank}" for w in machine.workers.all()})) or "none"
        what = f"replica {target.replica}" + (f" rank {target.rank}" if target.rank >= 0 else "")
        return Refusal("unknown-replica", f"{what} has no process on {target.node}", f"there are: {known}")
    if any(w.pid in (1, os.getpid(), os.getppid()) for w in found):
        return Refusal("refused", f"{found[0].text} is not a process that may be faulted")
    return refusal_of_foreign(found)


def refusal_of_foreign(found: tuple[Worker, ...]) -> Refusal | None:
    """None if this process may send signals to all of them."""
    foreign = [w for w in found if not may_signal(w.pid)]
    if foreign:
        return Refusal(
            "unsupported", f"{foreign[0].text} belongs to another user: the agent may not signal it", HELPER_HINT
        )
    return None


def refusal_of_stopped(machine: Machine, target: Target) -> Refusal | None:
    stopped = [w for w in targets(machine, target) if state_of(w.pid, w.start_time) in tuple(STOPPED)]
    if stopped:
        hint = f"kill -CONT {stopped[0].pid}, if nobody needs it to be stopped"
        return Refusal("refused", f"{stopped[0].text} is stopped already, and not by a fault of ours", hint)
    return None


class StoppedUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Processes that are held still (SIGSTOP), for all of the time or `percent` of every `period_s`."""

    processes: tuple[Worker, ...]
    percent: float = 100.0
    period_s: float = 0.0


def stop(undo: StoppedUndo) -> None:
    """Returns when they stand still. Raises HostError if none of them lives any more, or one goes on."""
    sent = [w for w in undo.processes if send_to(w.pid, w.start_time, signal.SIGSTOP)]
    if not sent:
        raise HostError(f"stop {', '.join(w.text for w in undo.processes)}", 0, "it has just ended")
    deadline = time.monotonic() + STOPS_WITHIN_S
    while moving := [w for w in sent if state_of(w.pid, w.start_time) not in ("", *STOPPED)]:
        if time.monotonic() > deadline:
            raise HostError(f"stop {moving[0].text}", 0, "it waits in the kernel, and is not stopped there")
        time.sleep(0.0005)


def resume(undo: StoppedUndo) -> str:
    going = [w for w in undo.processes if send_to(w.pid, w.start_time, signal.SIGCONT)]
    gone = [w for w in undo.processes if w not in going]
    words = [f"{', '.join(w.text for w in going)} goes on"] if going else []
    words += [f"{', '.join(w.text for w in gone)} has ended meanwhile"] if gone else []
    return "; ".join(words)


def stopped(undo: StoppedUndo) -> Probe:
    states = [(w, state_of(w.pid, w.start_time)) for w in undo.processes]
    still = [w for w, state in states if state and state in STOPPED]
    if still:
        return Probe(True, f"{', '.join(w.text for w in still)} stands still")
    words = [f"{w.text} {'runs' if state else 'has ended'}" for w, state in states]
    return Probe(False, ", ".join(words))


def resume_by_hand(undo: StoppedUndo) -> list[str]:
    return [f"kill -CONT {w.pid}   # {w.replica} rank {w.rank}, if it is still that process" for w in undo.processes]


class Standstill(Fault[StoppedUndo]):
    """What all faults do that hold processes still; which processes those are, each kind says."""

    undo_type = StoppedUndo
    privileged = True

    def inject(self, machine: Machine, undo: StoppedUndo) -> None:
        stop(undo)

    def undo(self, machine: Machine, undo: StoppedUndo) -> str:
        return resume(undo)

    def probe(self, machine: Machine, undo: StoppedUndo) -> Probe:
        return stopped(undo)

    def by_hand(self, undo: StoppedUndo) -> list[str]:
        return resume_by_hand(undo)
