"""Keeps the replica processes of this node as they are wanted: started, stopped, started again after a failure.

One thread owns all of it and sleeps until something happens: a process ends (its pidfd becomes readable), the fork
server answers, an operator asks, or a time is up. Calls from other threads are put into a queue and are quick; they
return once the wish is on disk, so that an answered `stop` survives the agent.

Processes belong to the fork server, not to the agent: an agent that is killed takes none with it, and the next one
reads from STATE/replicas/ what was wanted, which process is which, and how those ended that ended meanwhile. (Under
systemd this needs KillMode=process in the agent's unit.)
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents.api.models import ProcessView
from agents.because import NOTHING, Because, Emit, tell
from agents.host.pidfile import Taken, take
from agents.host.processes import boot_s
from agents.host.workers import Worker
from agents.recovery import whole
from agents.recovery.errors import SupervisionUnavailable, UnknownReplica
from agents.recovery.forkclient import ForkClient
from agents.recovery.forkclient import Phase as ServerPhase
from agents.recovery.policy import Limits
from agents.recovery.records import Children, NotSpawned, Spawned
from agents.recovery.unit import Unit
from agents.settings import AgentSettings, SettingsProblem, Supervised
from ftar_core.wire.ids import valid_name

_LOG = logging.getLogger(__name__)

_ACK_S = 2.0  # a call waits so long for its wish to be on disk; it is carried out in any case
_SAMPLE_S = 1.0
_CLOSE_SLACK_S = 10.0  # beyond the grace, for SIGKILL and the exit statuses
_AFTER_ERROR_S = 0.5
MASTER_PORT = 29500  # torchrun's default; the second replica of a node gets the next one


@dataclass
class _Wish:
    units: list[Unit]
    act: Callable[[Unit], None]
    because: Because
    done: threading.Event = field(default_factory=threading.Event)


class Supervisor:
    """`emit(kind, object, reason)` is called for everything that happens to a replica, in the supervisor's thread (in
    the thread of `start` for what an earlier agent left). Kinds: replica.{started, adopted, exited, backoff, failed,
    stopping, killed, unrecorded}, forkserver.{lost, retired, threads, import-failed}.

    Raises SettingsProblem for replicas that cannot be supervised as they are written.
    """

    def __init__(self, settings: AgentSettings, emit: Emit) -> None:
        self.held: Callable[[], str] = lambda: ""  # why no process may be started now
        self._settings = settings
        self._emit_to = emit
        _check(settings)
        self._root = settings.state_dir / "replicas"
        self._server_directory = settings.state_dir / "forkserver"
        self._names = frozenset(s.replica for s in settings.supervision.replicas)
        self._wishes: queue.SimpleQueue[_Wish] = queue.SimpleQueue()
        self._broken_since: dict[str, float] = {}  # replicas of which some ranks run without the others
        self._views: list[ProcessView] = []
        self._views_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lock_fd: int | None = None
        self._closing: bool | None = None  # keep_processes, once close was called
        self._wake_r = self._wake_w = -1

    # --- calls from other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what an earlier agent started, then start what should run. Raises SupervisionUnavailable."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._server_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = self._lock(self._server_directory / "agent.lock")
            self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._units = [self._unit(spec) for spec in self._settings.supervision.replicas]
            now = boot_s()
            for unit in self._units:
                unit.recover(now)
        except OSError as error:
            self._unlock()
            where = error.filename or self._root
            raise SupervisionUnavailable(
                f"state directory {where}",
                error.strerror or str(error),
                hint="check the owner and free space of state_dir",
            ) from None
        preload = tuple(self._settings.supervision.preload)
        self._client = ForkClient(self._server_directory, preload, self._settings.node, self._emit)
        self._publish()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def close(self, keep_processes: bool) -> None:
        """End supervision. Without keep_processes all replicas are stopped first (SIGTERM, grace, SIGKILL) and the fork
        server ends; what is wanted of them stays as it was, so the next agent starts them again."""
        thread = self._thread
        if thread is None:
            return
        self._closing = keep_processes
        self._wake()
        thread.join()
        self._thread = None

    def views(self) -> list[ProcessView]:
        with self._views_lock:
            return list(self._views)

    def workers(self) -> list[Worker]:
        """The processes that live now, by identity."""
        if self._thread is None:
            return []
        alive = [(unit, unit.handle) for unit in self._units]
        return [
            Worker(unit.spec.replica, unit.spec.rank, handle.pid, handle.start_time)
            for unit, handle in alive
            if handle is not None
        ]

    def supervises(self, name: str) -> bool:
        return name in self._names

    def start_replica(self, name: str) -> None:
        """Start it, also if it failed, finished or was drained; nothing if it runs. Raises UnknownReplica."""
        self._wish(name, lambda unit: unit.start())

    def stop_replica(self, name: str, reason: str = "stopped", because: Because = NOTHING) -> None:
        """Stop it and keep it stopped, over agent restarts too. `reason`: why, and by whom. Raises UnknownReplica."""
        self._wish(name, lambda unit: unit.stop(boot_s(), reason), because)

    def restart_replica(self, name: str, reason: str, because: Because = NOTHING) -> None:
        """Stop it and start it again without a delay. Raises UnknownReplica."""
        self._wish(name, lambda unit: unit.restart(boot_s(), reason), because)

    def rejoin(self, name: str, because: Because = NOTHING) -> None:
        """Start a replica that was drained, stopped or failed, or is about to end drained. Raises UnknownReplica."""
        self._wish(name, lambda unit: unit.rejoin(), because)

    def leaves(self, name: str, because: Because) -> None:
        """It is about to end by itself, because of this. Raises UnknownReplica."""
        self._wish(name, lambda unit: None, because)

    def _wish(self, name: str, act: Callable[[Unit], None], because: Because = NOTHING) -> None:
        wish = _Wish(self._of(name), act, because)
        self._wishes.put(wish)
        self._wake()
        wish.done.wait(_ACK_S)

    def _of(self, name: str) -> list[Unit]:
        if name not in self._names or self._thread is None:
            known = ", ".join(sorted(self._names)) or "none"
            raise UnknownReplica(f"replica {name}", "this agent does not supervise it", hint=f"it supervises: {known}")
        return [unit for unit in self._units if unit.spec.replica == name]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes as well
            os.write(self._wake_w, b"w")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        sampled_s = 0.0
        stop_by_s = 0.0
        while self._closing is not True:
            try:
                self._turn()
                now = boot_s()
                if self._closing is False:
                    stop_by_s = stop_by_s or now + self._settings.supervision.grace_s + _CLOSE_SLACK_S
                    for unit in self._units:
                        unit.halt(now, "the agent shuts down")
                    if not any(unit.busy for unit in self._units) or now > stop_by_s:
                        break
                if now - sampled_s >= _SAMPLE_S:
                    sampled_s = now
                    for unit in self._units:
                        unit.sample()
                self._publish()
                self._sleep()
            except Exception:  # noqa: BLE001 - a bug in one turn must not end the supervision of everything
                _LOG.exception("supervision goes on after an error of its own")
                time.sleep(_AFTER_ERROR_S)
        self._leave()

    def _turn(self) -> None:
        """Do everything that is due."""
        with contextlib.suppress(queue.Empty):
            while True:
                wish = self._wishes.get_nowait()
                try:
                    for unit in wish.units:
                        unit.because = wish.because
                        wish.act(unit)
                finally:
                    wish.done.set()
        if not self._units:
            return
        was_ready = self._client.phase is ServerPhase.READY
        if self._closing is None or self._client.phase is not ServerPhase.ABSENT:
            self._answers(self._client.tick(time.monotonic()))
        ready = self._client.phase is ServerPhase.READY
        now = boot_s()
        for unit in self._units:
            if was_ready and not ready:
                unit.server_lost(now)
            unit.tick(now, self._client.exits.get(unit.life_key()))
        if self._closing is None:
            for units in self._replicas().values():
                self._keep_whole(units, now, ready)
        if ready and any(unit.overdue(now) for unit in self._units):
            self._client.ask_children(time.monotonic())

    def _replicas(self) -> dict[str, list[Unit]]:
        found: dict[str, list[Unit]] = {}
        for unit in self._units:
            found.setdefault(unit.spec.replica, []).append(unit)
        return found

    def _keep_whole(self, units: list[Unit], now: float, ready: bool) -> None:
        """The ranks of a replica start together, and none goes on without the others."""
        replica = units[0].spec.replica
        verdict = whole.judge({u.spec.rank: u.now() for u in units}, now - self._broken_since.get(replica, now))
        if verdict.broken:
            self._broken_since.setdefault(replica, now)
        else:
            self._broken_since.pop(replica, None)
        for unit in units:
            if unit.spec.rank in verdict.end:
                unit.end_with_the_others(now, verdict.why, again=verdict.again)
            elif verdict.start and ready and not self.held():
                self._client.spawn(unit.request())

    def _answers(self, answers: list[Spawned | NotSpawned | Children]) -> None:
        now = boot_s()
        units = {unit.name: unit for unit in self._units}
        for answer in answers:
            if isinstance(answer, Children):
                # A request of an earlier agent may have been carried out after that agent's end.
                for child in answer.children:
                    if child.exit is None and child.name in units:
                        units[child.name].found(child.life, now)
            elif answer.name in units:
                unit = units[answer.name]
                if isinstance(answer, Spawned):
                    unit.spawned(answer, now)
                else:
                    unit.not_spawned(answer, now)

    def _sleep(self) -> None:
        """Until something is readable or due. The descriptors are few and gathered anew: nothing to keep in step."""
        now = boot_s()
        alone = [max(0.0, since + whole.ALONE_S - now) for since in self._broken_since.values()]
        wait_s = min(
            [_SAMPLE_S, *alone, self._client.wait_s(time.monotonic()), *(unit.due_s(now) for unit in self._units)]
        )
        poll = select.poll()
        watched = [unit.handle.fd for unit in self._units if unit.handle is not None and unit.handle.fd is not None]
        for fd in (self._wake_r, *self._client.descriptors(), *watched):
            poll.register(fd, select.POLLIN)
        poll.poll(max(1.0, wait_s * 1000.0))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_r, 4096):
                pass

    def _publish(self) -> None:
        now = boot_s()
        note = "" if self._client.phase is ServerPhase.READY else self._client.note
        views = [unit.view(now, note or self._held_up(unit)) for unit in self._units]
        with self._views_lock:
            self._views = views

    def _held_up(self, unit: Unit) -> str:
        ranks = {u.spec.rank: u.now() for u in self._units if u.spec.replica == unit.spec.replica}
        return self.held() or whole.waits_for(ranks, unit.spec.rank) if unit.wants_spawn() else ""

    def _leave(self) -> None:
        try:
            self._client.close(retire=self._closing is False)
            for unit in self._units:
                unit.close()
            self._publish()
        finally:
            self._unlock()

    # --- setting up ---------------------------------------------------------------------------------------------------

    def _unit(self, spec: Supervised) -> Unit:
        settings, supervision = self._settings, self._settings.supervision
        environment = {"FTAR_REPLICA": spec.replica, "FTAR_NODE": settings.node, "RANK": str(spec.rank)}
        environment |= _inside(supervision.replicas, spec)
        if settings.ranks_socket is not None:
            environment["FTAR_AGENT"] = str(settings.ranks_socket)
        if settings.allow_faults:
            environment["FTAR_BREAKPOINTS"] = "allow"  # the agent may ask for faults inside the process; `env` wins
        return Unit(
            spec,
            environment,
            self._root / spec.replica / f"rank{spec.rank}",
            limits=Limits(supervision.backoff_s, supervision.backoff_max_s, supervision.healthy_s),
            grace_s=supervision.grace_s,
            emit=self._emit,
        )

    def _emit(self, kind: str, thing: str, reason: str, because: Because = NOTHING) -> None:
        _LOG.info("%s %s: %s", kind, thing, reason)
        try:
            tell(self._emit_to, kind, thing, reason, because)
        except Exception:  # noqa: BLE001 - whoever listens, supervision goes on
            _LOG.exception("an event could not be passed on: %s %s: %s", kind, thing, reason)

    def _lock(self, path: Path) -> int:
        """Two agents on one state directory would start every replica twice."""
        try:
            return take(path)
        except Taken as taken:
            raise SupervisionUnavailable(
                f"state directory {self._settings.state_dir}",
                f"supervision: {taken.why('agent')}",
                hint="stop that agent first, or give this one a state_dir of its own",
            ) from None

    def _unlock(self) -> None:
        for fd in (self._lock_fd, self._wake_r, self._wake_w):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._lock_fd, self._wake_r, self._wake_w = None, -1, -1


def _inside(specs: Sequence[Supervised], spec: Supervised) -> dict[str, str]:
    """What torchrun would set for the ranks of a replica that are all on this node; `env` of the configuration goes
    before it, where a replica has ranks on several nodes."""
    ranks = sorted(s.rank for s in specs if s.replica == spec.replica)
    if len(ranks) == 1:
        return {}
    number = list(dict.fromkeys(s.replica for s in specs)).index(spec.replica)
    return {
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(ranks.index(spec.rank)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(MASTER_PORT + number),
    }


def _check(settings: AgentSettings) -> None:
    supervision = settings.supervision
    seen: set[tuple[str, int]] = set()
    for spec in supervision.replicas:
        where = f"supervision.replicas: {spec.replica!r}"
        if not valid_name(spec.replica):
            raise SettingsProblem(f"{where}: not a replica name (1 to 63 of a-z, 0-9, '.', '_', '-')")
        if spec.rank < 0:
            raise SettingsProblem(f"{where}: rank {spec.rank} is below 0")
        if (spec.replica, spec.rank) in seen:
            raise SettingsProblem(f"{where}: rank {spec.rank} is there twice")
        seen.add((spec.replica, spec.rank))
    for name in ("grace_s", "backoff_s", "backoff_max_s", "healthy_s"):
        value = getattr(supervision, name)
        least = 0.001 if name.startswith("backoff") else 0.0  # a crash loop without any delay would be a busy loop
        if not (math.isfinite(value) and value >= least):
            raise SettingsProblem(f"supervision.{name}: {value} is not a time in seconds ({least:g} or more)")
    for name in supervision.preload:
        if not all(part.isidentifier() for part in name.split(".")):
            raise SettingsProblem(f"supervision.preload: {name!r} is not the name of a module")
