"""The watchdog: a small process beside the agent that takes faults back when the agent cannot.

    python -m agents.injection.watchdog --state-dir DIR --agent-fd N [--whose helper]

The agent starts it in a session of its own and hands it a pidfd (pidfd_open(2)) of itself, which becomes readable when
the agent is dead, however it died; no pid can be mistaken for another. While the agent lives, the watchdog only steps
in for faults that are overdue by a second (an agent that is stopped or hangs). Once it is dead, the watchdog takes back
every fault when its time is up, and ends when none is left. A new agent takes back everything at once when it starts,
and has a watchdog of its own; the old one finds nothing open and ends.

Everything it may need is imported at the start, and none of it is heavy: at the worst moment there may be no memory, no
disk and no time left to load code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from pathlib import Path
from types import FrameType

from agents.api.words import FaultState
from agents.host.machine import Machine
from agents.host.signals import let_through
from agents.injection.layout import ledger_directory, scratch_directory
from agents.injection.ledger import Entry, Ledger, LedgerError
from agents.injection.reverting import Reverter

WATCH_S = 0.5  # between two looks at the ledger while the agent lives
POLL_S = 0.1  # between two looks when it is dead
OVERDUE_S = 1.0  # the agent's own revert, with its first retries, is given so long
RETRY_S = 5.0  # between attempts at a stuck fault


class Watchdog:
    """The decisions, one look at a time, without process or clock of its own."""

    def __init__(
        self, ledger: Ledger, machine: Machine, reverter: Reverter | None = None, whose: str = "agent"
    ) -> None:
        self._ledger = ledger
        self._whose = whose
        self._machine = machine
        self._reverter = reverter or Reverter(ledger, machine)
        self._retry_boot_s: dict[str, float] = {}

    def look(self, *, agent_lives: bool, all_now: bool = False) -> int:
        """Take back what is due; returns how many faults are still open. Raises LedgerError."""
        grace_s = OVERDUE_S if agent_lives else 0.0
        left = 0
        for entry in self._ledger.read().entries:
            if not entry.open:
                continue
            now = self._machine.clock.boot_s()
            other_boot = entry.boot_id != self._machine.clock.boot_id()
            due = all_now or other_boot or entry.due_boot_s() + grace_s <= now
            if due and self._retry_boot_s.get(entry.id, 0.0) <= now:
                left += self._revert(entry, agent_lives=agent_lives)
            else:
                left += 1
        return left

    def _revert(self, entry: Entry, *, agent_lives: bool) -> bool:
        """True if it is still open afterwards."""
        if agent_lives and entry.state is FaultState.STUCK:
            return True  # the agent knows, and tries on
        who = f"the {self._whose} does not answer" if agent_lives else f"the {self._whose} is dead"
        result = self._reverter.revert(entry.id, f"by the watchdog: {who}, and its time is up")
        if result is not None:
            with contextlib.suppress(OSError):  # the log's disk may be full, or its reader gone
                print(f"ft-agent watchdog: {entry.id} on {entry.target}: {result.detail}", file=sys.stderr, flush=True)
        if result is not None and result.open:
            self._retry_boot_s[entry.id] = self._machine.clock.boot_s() + RETRY_S
            return True
        return False


def run(ledger: Ledger, watchdog: Watchdog, agent_fd: int, stop_fd: int) -> None:
    """Until the agent is dead and nothing is open, or a SIGTERM (a byte on `stop_fd`) asks to finish now."""
    poller = select.poll()
    poller.register(agent_fd, select.POLLIN)
    poller.register(stop_fd, select.POLLIN)
    agent_lives, stopping = True, False
    wait_s = WATCH_S
    seen = -1
    open_faults = 0
    while True:
        ready = {fd for fd, _event in poller.poll(wait_s * 1000)}
        if agent_fd in ready:
            agent_lives = False
            poller.unregister(agent_fd)
        if stop_fd in ready:
            os.read(stop_fd, 64)
            stopping = True
        if stopping and agent_lives:
            return
        wait_s = WATCH_S if agent_lives else POLL_S
        try:
            changed = ledger.directory.stat().st_mtime_ns
            if changed != seen or open_faults or not agent_lives:
                seen = changed
                open_faults = watchdog.look(agent_lives=agent_lives, all_now=stopping)
        except FileNotFoundError:
            open_faults = 0  # somebody removed the whole ledger: nothing left to go by
        except (LedgerError, OSError):
            open_faults = max(1, open_faults) if ledger.directory.is_dir() else 0
        if not agent_lives and (open_faults == 0 or stopping):
            return


def main() -> int:
    parser = argparse.ArgumentParser(prog="agents.injection.watchdog")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--agent-fd", type=int, required=True)
    parser.add_argument("--whose", default="agent")
    options = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        try:
            os.write(stop_write, b"x")
        except BlockingIOError:
            pass

    signal.signal(signal.SIGTERM, stop)
    let_through()
    machine = Machine(scratch=scratch_directory(options.state_dir))
    ledger = Ledger(ledger_directory(options.state_dir))
    run(ledger, Watchdog(ledger, machine, whose=options.whose), options.agent_fd, stop_read)
    return 0


if __name__ == "__main__":
    sys.exit(main())
