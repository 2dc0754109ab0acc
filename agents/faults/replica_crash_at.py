"""A rank fails at a named point of a step: between the last bucket and the commit, while it serves its state, ...

The rank does it itself (ftar_core/wire/breakpoints.py), so it hits exactly there. It listens only if it was started
with FTAR_BREAKPOINTS, as an agent that may inject faults starts its replicas. What waits for its step is forgotten when
it is taken back, and by the rank itself after `within_s`, so that nothing lasts even where the agent is dead: the
watchdog is not connected to ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import processes
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.processes import send_to, state_of
from agents.host.workers import Worker
from ftar_core.wire.agentlink import ArmBreakpoints
from ftar_core.wire.breakpoints import parse, rank_points

HEARD_WITHIN_S = 4.0  # ranks look for orders when they report, at least every second


class CrashUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`until_boot_s` (CLOCK_BOOTTIME): the ranks have forgotten it then."""

    processes: tuple[Worker, ...]
    text: str  # as FTAR_BREAKPOINTS would have it
    for_ms: int
    until_boot_s: float


class ReplicaCrashAt(Fault[CrashUndo]):
    spec = SPECS["replica-crash-at"]
    undo_type = CrashUndo

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        refusal = processes.refusal(machine, target)
        if refusal is not None:
            return refusal
        deaf = [w for w in processes.targets(machine, target) if not machine.workers.listens(w)]
        if deaf:
            hint = "start it with FTAR_BREAKPOINTS=allow and FTAR_AGENT"
            return Refusal("refused", f"{deaf[0].text} takes no breakpoints from its agent", hint)
        try:
            parse(_text(params), rank_points())
        except ValueError as error:
            return Refusal("bad-request", str(error))
        return None

    def plan(self, machine: Machine, target: Target, params: Params) -> CrashUndo:
        within_s = float(params["within_s"])
        found = processes.targets(machine, target)
        return CrashUndo(found, _text(params), int(within_s * 1000), machine.clock.boot_s() + within_s)

    def inject(self, machine: Machine, undo: CrashUndo) -> None:
        before = {worker: _taken(machine, worker) for worker in undo.processes}
        for worker in undo.processes:
            machine.workers.tell(worker, ArmBreakpoints(text=undo.text, for_ms=undo.for_ms))

        def deaf() -> list[Worker]:
            return [w for w in undo.processes if _runs(w) and _taken(machine, w) == before[w]]

        _until(lambda: not deaf())
        if deaf():
            raise HostError(f"ask {deaf()[0].text} for {undo.text}", 0, "it has not said that it heard")

    def undo(self, machine: Machine, undo: CrashUndo) -> str:
        for worker in undo.processes:
            if state_of(worker.pid, worker.start_time) == "T":  # by the breakpoint
                send_to(worker.pid, worker.start_time, signal.SIGCONT)
        waiting = [w for w in undo.processes if self._waits(machine, undo, w) is not False]
        for worker in waiting:
            machine.workers.tell(worker, ArmBreakpoints(text="", clear=True))
        _until(lambda: not any(self._waits(machine, undo, w) for w in waiting))
        return "its ranks have forgotten it" if waiting else "nothing of it is left in a rank"

    def probe(self, machine: Machine, undo: CrashUndo) -> Probe:
        if any(state_of(w.pid, w.start_time) == "T" for w in undo.processes):
            return Probe(True, f"{undo.text}: a rank stands still")
        waits = [self._waits(machine, undo, w) for w in undo.processes]
        words = ", ".join(w.text for w in undo.processes)
        if any(waits):
            return Probe(True, f"{undo.text}: waited for by {words}")
        if None in waits:
            return Probe(None, f"{undo.text}: perhaps waited for by {words}; forgotten within {undo.for_ms / 1000:g} s")
        return Probe(False, f"{undo.text}: {words} has come there, or ended before", spent=True)

    def by_hand(self, undo: CrashUndo) -> list[str]:
        return [f"# nothing: its ranks forget it within {undo.for_ms / 1000:g} s"]

    def _waits(self, machine: Machine, undo: CrashUndo, worker: Worker) -> bool | None:
        """None: it may, and cannot be asked."""
        if not _runs(worker) or machine.clock.boot_s() >= undo.until_boot_s:
            return False
        said = machine.workers.armed(worker)
        return None if said is None else said.waiting > 0


def _text(params: Params) -> str:
    text = f"{params['point']},step={int(params['step'])},action={params['action']}"
    return text + (f",ms={int(params['sleep_ms'])}" if params["action"] == "sleep" else "")


def _taken(machine: Machine, worker: Worker) -> int:
    said = machine.workers.armed(worker)
    return 0 if said is None else said.taken


def _runs(worker: Worker) -> bool:
    return bool(state_of(worker.pid, worker.start_time))


def _until(condition: Callable[[], bool]) -> None:
    """Or for HEARD_WITHIN_S: what it then is, a probe says."""
    deadline = time.monotonic() + HEARD_WITHIN_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
