"""One supervised process: rank N of a replica, through all its lives.

    STOPPED, EXITED, FAILED --start--> STARTING --spawned--> RUNNING --stop--> STOPPING
                                        ^   |                   |                 |
                                        |   `-- not spawned     `----- ended -----'
                                        |          |                     |
                                        |       BACKOFF <--policy--   ENDING --policy--> STOPPED, EXITED, FAILED
                                        `--due-----'                (exit status)

Nothing here waits: `tick` looks at the process and at the clock and moves on as far as it can. What was decided is on
disk before it is acted upon (unitrecords.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path

import msgspec

from agents.api.models import ProcessView
from agents.because import NOTHING, Because
from agents.host.processes import TICKS_PER_S, Handle, boot_id, kill_session, read_stat
from agents.recovery import logs, policy
from agents.recovery.policy import Action, Ending, Intent, Limits
from agents.recovery.records import Exit, Life, NotSpawned, Outcome, Spawn, Spawned, State
from agents.recovery.unitrecords import UnitRecords, fingerprint
from agents.recovery.usage import Usage, UsageMeter
from agents.recovery.whole import RankNow
from agents.settings import Supervised

STATUS_DEADLINE_S = 5.0  # for the exit status of a process that ended while its fork server lives
_STATUS_SOON_S = 0.2
KILL_AGAIN_S = 1.0


class Phase(str, Enum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    BACKOFF = "backoff"
    STOPPED = "stopped"
    EXITED = "exited"
    FAILED = "failed"


_SHOWN = {Phase.STOPPING: "running", Phase.ENDING: "exited"}
_AT_REST = (Phase.STOPPED, Phase.EXITED, Phase.FAILED)
_RESTING = {Outcome.FINISHED: Phase.EXITED, Outcome.FAILED: Phase.FAILED, Outcome.DRAINED: Phase.STOPPED}


class Unit:
    """Not thread-safe: belongs to the supervisor's thread. Times are seconds since boot (processes.boot_s)."""

    def __init__(
        self,
        spec: Supervised,
        environment: dict[str, str],
        directory: Path,
        *,
        limits: Limits,
        grace_s: float,
        emit: Callable[[str, str, str, Because], None],
    ) -> None:
        self.spec = spec
        self.name = f"{spec.replica}/{spec.rank}"  # to the fork server
        self.object = spec.replica if spec.rank == 0 else self.name  # to people
        self.directory = directory
        self.log_path = directory / "log"
        self.handle: Handle | None = None
        self._records = UnitRecords(directory, State(wanted=spec.autostart), self._unrecorded)
        self.phase = Phase.STOPPED
        self._environment = environment
        self._limits = limits
        self._grace_s = grace_s
        self._emit_to = emit
        self.because = NOTHING  # of what was asked for last, until the next life has begun
        self._intent = Intent.NONE
        self._why = ""  # of the intent, in the operator's words
        self._life: Life | None = None
        self._asked = False  # a Spawn is under way
        self._at_s = 0.0  # BACKOFF: start then; STOPPING: SIGKILL then; ENDING: give up the exit status then
        self._meter = UsageMeter()
        self._usage: Usage | None = None
        self._killed = False  # SIGKILL was sent to this life

    @property
    def state(self) -> State:
        return self._records.state

    # --- what operators ask for ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._records.change(wanted=True, outcome=Outcome.NONE, failures=0, reason="")
        if self.phase in (*_AT_REST, Phase.BACKOFF):
            self._intent = Intent.NONE
            self.phase = Phase.STARTING
        elif self.phase is Phase.STARTING:
            self._intent = Intent.NONE
        elif self.phase in (Phase.STOPPING, Phase.ENDING):
            self._intent, self._why = Intent.RESTART, self._why or "asked to start again"

    def rejoin(self) -> None:
        """Start it. A drained process takes seconds to be gone; a rejoin in that time is for the next life."""
        self.start()
        if self.phase is Phase.RUNNING:
            self._records.change(rejoined_life=self.state.life)

    def stop(self, now: float, why: str) -> None:
        self._records.change(wanted=False, reason=why)
        self.halt(now, why)

    def restart(self, now: float, why: str) -> None:
        self._records.change(wanted=True, outcome=Outcome.NONE, failures=0)
        if self.phase is Phase.RUNNING:
            self._end(now, Intent.RESTART, why)
        else:
            self.start()

    def end_with_the_others(self, now: float, why: str, *, again: bool) -> None:
        """Its replica is broken: a rank alone is of no use."""
        if self.phase is Phase.RUNNING:
            self._end(now, Intent.RESTART if again else Intent.STOP, why)

    def halt(self, now: float, why: str) -> None:
        """End the process without changing what is wanted: the next agent starts it again."""
        if self.phase is Phase.RUNNING:
            self._end(now, Intent.STOP, why)
        elif self.phase in (Phase.STOPPING, Phase.ENDING):
            self._intent, self._why = Intent.STOP, why
        elif self.phase is Phase.BACKOFF or (self.phase is Phase.STARTING and not self._asked):
            self.phase = Phase.STOPPED
        elif self.phase is Phase.STARTING:
            self._intent, self._why = Intent.STOP, why  # as soon as the answer is here

    # --- what was, when the agent starts ------------------------------------------------------------------------------

    def recover(self, now: float) -> None:
        """Go on from what an earlier agent left: adopt its process, learn how it ended, or start."""
        if self._records.recover() and self.state.spec != fingerprint(self.spec):
            self._records.change(outcome=Outcome.NONE)  # that was another configuration's
        life = self._records.life()
        if life is not None and life.life > self.state.settled_life:
            self._intent = Intent.NONE if self.state.wanted else Intent.STOP
            self._adopt(life, now, adopted=True)
            return
        if self.state.outcome is not Outcome.NONE:
            self.phase = _RESTING[self.state.outcome]
        else:
            self.phase = Phase.STARTING if self.state.wanted else Phase.STOPPED

    def _adopt(self, life: Life, now: float, *, adopted: bool) -> None:
        self._life, self._meter = life, UsageMeter()
        self._asked = False
        self._records.change(life=max(life.life, self.state.life))
        same_boot = life.boot_id == boot_id()
        self.handle = Handle.open(life.pid, life.start_time) if same_boot else None
        if not adopted:
            fresh = " from a new interpreter" if life.fresh else ""
            self._emit("replica.started", self.object, f"process {life.pid}, start {self.state.starts}{fresh}")
            self.because = NOTHING
        if self.handle is None:
            self.phase = Phase.ENDING
            self._at_s = now + STATUS_DEADLINE_S if same_boot else now
            return
        self.phase = Phase.RUNNING
        if adopted:
            text = f"process {life.pid} was started by an earlier agent and goes on"
            self._emit("replica.adopted", self.object, text)
        if self._intent is Intent.STOP or not self.state.wanted:
            self._end(now, Intent.STOP, self._why or "it is meant to be stopped")

    def found(self, life: Life, now: float) -> None:
        """The fork server runs a life of this unit that nobody here knew of."""
        if self.handle is None and self.phase is not Phase.ENDING and life.life > self.state.settled_life:
            self._adopt(life, now, adopted=True)

    # --- the fork server's answers ------------------------------------------------------------------------------------

    def wants_spawn(self) -> bool:
        return self.phase is Phase.STARTING and not self._asked

    def request(self) -> Spawn:
        """Ask for the next life. Its number is on disk first, so that no later agent uses it again."""
        self._asked = True
        self._records.change(life=self.state.life + 1, spec=fingerprint(self.spec))
        return Spawn(
            name=self.name,
            life=self.state.life,
            module=self.spec.module,
            args=tuple(self.spec.args),
            env={**os.environ, **self._environment, **self.spec.env},
            directory=str(self.directory),
            log=str(self.log_path),
            cwd=os.getcwd(),
        )

    def spawned(self, message: Spawned, now: float) -> None:
        if self.phase is Phase.STARTING and message.life.life > self.state.settled_life:
            self._records.change(starts=self.state.starts + 1)
            self._adopt(message.life, now, adopted=message.life.life != self.state.life)

    def not_spawned(self, message: NotSpawned, now: float) -> None:
        if self.phase is Phase.STARTING and self._asked and message.life == self.state.life:
            self._asked = False
            if self._intent is Intent.STOP:
                self.phase = Phase.STOPPED
                return
            if message.retiring:
                return  # not its failure: the next server is asked
            decision = policy.failed(message.reason, self.state.failures + 1, self._limits)
            self._records.change(failures=decision.failures, reason=decision.sentence)
            self._later(decision, decision.sentence, now)

    def server_lost(self, now: float) -> None:
        """No answer will come. If life.json is there the process was started, else it was not and will not be."""
        if self.phase is Phase.STARTING and self._asked:
            life = self._records.life()
            if life is not None and life.life == self.state.life:
                self._records.change(starts=self.state.starts + 1)
                self._adopt(life, now, adopted=False)
                return
            self._asked = False
            if self._intent is Intent.STOP:
                self.phase = Phase.STOPPED

    # --- what happens by itself ---------------------------------------------------------------------------------------

    def tick(self, now: float, known: Exit | None) -> None:
        """`known` is what the fork server says about the end of this life, if it was asked and knows."""
        if self.phase is Phase.BACKOFF and now >= self._at_s:
            self.phase = Phase.STARTING
        if self.phase in (Phase.RUNNING, Phase.STOPPING) and (self.handle is None or self.handle.ended()):
            self.phase = Phase.ENDING
            self._at_s = now + STATUS_DEADLINE_S
        if self.phase is Phase.STOPPING and now >= self._at_s:
            self._kill(now)
        if self.phase is Phase.ENDING:
            self._settle(now, known)

    def now(self) -> RankNow:
        """For what it means to the other ranks of its replica."""
        waiting = self.phase is Phase.STARTING and not self._asked
        return RankNow(
            runs=self.phase is Phase.RUNNING,
            wants_start=waiting,
            broken=self.phase in (Phase.ENDING, Phase.BACKOFF),
            failed=self.phase is Phase.FAILED,
        )

    @property
    def busy(self) -> bool:
        """A process of it is there, or may be."""
        return self.handle is not None or self.phase is Phase.ENDING or self._asked

    def overdue(self, now: float) -> bool:
        """It ended, and its exit status is not where it should be within milliseconds."""
        return self.phase is Phase.ENDING and now > self._at_s - STATUS_DEADLINE_S + _STATUS_SOON_S

    def life_key(self) -> tuple[str, int]:
        return (self.name, self._life.life if self._life else 0)

    def due_s(self, now: float) -> float:
        """Seconds until tick has something to do, if the process does not end before."""
        if self.phase is Phase.ENDING or (self.handle is not None and self.handle.fd is None):
            return 0.01
        if self.phase in (Phase.BACKOFF, Phase.STOPPING):
            return max(0.0, self._at_s - now)
        return 60.0

    def _settle(self, now: float, known: Exit | None) -> None:
        """Find out how the life ended, then let the policy decide."""
        life = self._life
        if life is None:
            raise RuntimeError(f"{self.name}: ended without a life")
        end = self._records.end_of(life) or known
        if end is None:
            server = read_stat(life.server_pid)
            alive = server is not None and server.start_time == life.server_start_time and not server.ended
            if alive and now < self._at_s:
                return
            end = self._records.end_of(life)  # it may have been written just before the server ended
        same_boot = life.boot_id == boot_id()
        ended = end.ended_boot_s if end is not None and same_boot else now
        if end is None and same_boot:
            kill_session(life.pid, life.start_time, ended_s=ended)  # else the server did it
        started = life.start_time / TICKS_PER_S if same_boot else ended
        history = policy.History(started, self.state.failures, self._intent)
        ending = Ending(end.exit_code, end.signal) if end is not None else Ending()
        decision = policy.decide(ending, history, self._limits, ended)
        if decision.action is Action.WAIT and self.state.rejoined_life == life.life:
            decision = policy.decide(ending, replace(history, intent=Intent.RESTART), self._limits, ended)
        self._drop_handle()
        self._conclude(decision, ending, life, now)

    def _conclude(self, decision: policy.Decision, ending: Ending, life: Life, now: float) -> None:
        lines = logs.tail(self.log_path, life.log_offset)
        lines = [line for line in lines if not line.startswith(f"--- {self.name}, start ")]
        bad = decision.action in (Action.FAIL, Action.START) and self._intent is Intent.NONE
        why = f" ({self._why})" if self._why and self._intent is not Intent.NONE else ""
        sentence = decision.sentence + why
        shown = sentence + (f". Last lines of {self.log_path}: {' | '.join(lines)}" if bad and lines else "")
        exit_code = ending.exit_code if ending.signal is None else -ending.signal
        settled = {"settled_life": life.life, "exit_code": exit_code, "reason": shown, "failures": decision.failures}
        self._intent, self._why = Intent.NONE, ""
        if decision.action is Action.START:
            self._records.change(**settled)
            self._emit("replica.exited", self.object, shown)
            self._later(decision, f"starts again in {decision.delay_s:.1f} s", now)
            return
        outcome = {Action.DONE: Outcome.FINISHED, Action.FAIL: Outcome.FAILED, Action.WAIT: Outcome.DRAINED}
        self._records.change(**settled, outcome=outcome.get(decision.action, Outcome.NONE))
        self.phase = _RESTING.get(self.state.outcome, Phase.STOPPED)
        self._emit("replica.failed" if decision.action is Action.FAIL else "replica.exited", self.object, shown)

    def _later(self, decision: policy.Decision, text: str, now: float) -> None:
        self._at_s = now + decision.delay_s
        self.phase = Phase.BACKOFF if decision.delay_s > 0 else Phase.STARTING
        if decision.delay_s > 0:
            self._emit("replica.backoff", self.object, text)

    def _end(self, now: float, intent: Intent, why: str) -> None:
        self._intent, self._why = intent, why
        self._at_s = now + self._grace_s
        self._killed = False
        self.phase = Phase.STOPPING
        if self.handle is not None:
            self.handle.send(signal.SIGTERM)
        self._emit(
            "replica.stopping", self.object, f"{why}: SIGTERM sent, SIGKILL in {self._grace_s:g} s if it is needed"
        )

    def _kill(self, now: float) -> None:
        self._at_s = now + KILL_AGAIN_S
        if self.handle is None:
            return
        if not self._killed:
            self._emit("replica.killed", self.object, f"still there {self._grace_s:g} s after SIGTERM: SIGKILL sent")
        self._killed = True
        kill_session(self.handle.pid, self.handle.start_time)
        self.handle.send(signal.SIGKILL)  # also if it was not yet the leader of its session

    # --- for the views ------------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Read CPU and memory; keep the log within its bound."""
        if self.handle is None or self._life is None:
            self._usage = None
            return
        if logs.cut(self.log_path):
            self._life = msgspec.structs.replace(self._life, log_offset=0)
        self._usage = self._meter.read(self.handle.pid)

    def view(self, now: float, note: str) -> ProcessView:
        """`note` is the reason to show while it waits for the fork server."""
        reason = self.state.reason
        if self.phase is Phase.STARTING:
            reason = note or reason
        elif self.phase is Phase.STOPPING:
            reason = f"{self._why}: SIGTERM sent, SIGKILL in {max(0.0, self._at_s - now):.0f} s if it is needed"
        elif self.phase is Phase.ENDING:
            reason = "it ended; its exit status is not known yet"
        elif self.phase is Phase.RUNNING:
            reason = self._drift()
        usage = self._usage if self.handle is not None else None
        return ProcessView(
            replica=self.spec.replica,
            rank=self.spec.rank,
            pid=self.handle.pid if self.handle is not None and self.phase is not Phase.ENDING else None,
            state=_SHOWN.get(self.phase, self.phase.value),
            exit_code=None if self.busy else self.state.exit_code,
            restarts=max(0, self.state.starts - 1),
            next_start_s=max(0.0, self._at_s - now) if self.phase is Phase.BACKOFF else None,
            cpu_percent=usage.cpu_percent if usage else None,
            rss_mb=usage.rss_mb if usage else None,
            status=usage.status if usage else "",
            log=str(self.log_path),
            reason=reason,
        )

    def _drift(self) -> str:
        changed = self.state.spec != fingerprint(self.spec)
        return "its configuration changed; restart it to apply the new one" if changed else ""

    def _emit(self, kind: str, thing: str, reason: str) -> None:
        self._emit_to(kind, thing, reason, self.because)

    def _unrecorded(self, reason: str) -> None:
        self._emit("replica.unrecorded", self.object, reason)

    # --- small steps --------------------------------------------------------------------------------------------------

    def _drop_handle(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None

    def close(self) -> None:
        self._drop_handle()
