"""Checkpoints of one rank, beside its training: when one is due, the snapshot, and who writes it.

    due -> copying -> kept -> (written here | complete by another's hand) -> forgotten
              `-> missed: the next step, if this replica is the one that writes

The training thread only says that a step is committed and asks the shelf for a copy, as a replica that catches up would
(shelf.py, snapshots.py): it is made beside the training, and an update waits for it no longer than a small share of a
step. Everything else happens in a thread of this file, which gives way to the training. It fails for itself: whatever
goes wrong with a disk costs a checkpoint, and a line and an event that say why; the next one is tried when it is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ftar_core
from ftar_core.errors import FtarError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.settings import Settings
from ftar_core.training.checkpoints import histories, locks, tree, writing
from ftar_core.training.checkpoints.layout import Manifest, part_name
from ftar_core.training.checkpoints.options import Checkpoint
from ftar_core.training.checkpoints.turns import Order, is_mine, order_of
from ftar_core.training.journal import Journal
from ftar_core.training.shelf import Borrower, Shelf
from ftar_core.training.snapshots import Held
from ftar_core.wire.messages import CheckpointNotice, Commit, EpochInfo, Message

log = logging.getLogger("ftar.checkpoint")
PATIENCE = 0.05  # of a step: so long may an update wait for a snapshot from the first try on
LOOK_S = 0.2
END_S = 600.0  # behind the job's last step: the longest that a process stays for its checkpoint
RNG = "not kept: random generators are each replica's own; seed from session.current_step what must repeat"


@dataclass(eq=False)
class Task:
    """One checkpoint that is due."""

    order: Order
    history: int  # of the job, as this replica knows it
    commit: Commit | None  # None: of a job that holds, after a step that was committed before
    borrower: Borrower
    began: float


class Keeper:
    """`here`: the epoch as this rank knows it. `tell` posts to the coordinator. `incarnation`: of this life."""

    def __init__(
        self,
        options: Checkpoint,
        *,
        settings: Settings,
        shelf: Shelf,
        names: tree.Names,
        here: Callable[[], EpochInfo | None],
        incarnation: Callable[[], int],
        tell: Callable[[Message], None],
        journal: Journal,
    ) -> None:
        self.options, self._settings, self._shelf, self._names = options, settings, shelf, names
        shelf.max_held += 1  # ours beside those that are fetched
        self._here, self._incarnation, self._tell, self._journal = here, incarnation, tell, journal
        self._changed = threading.Condition()
        self._task: Task | None = None  # the newest
        self._working: Task | None = None
        self._again = False  # the copy was abandoned, and it is this replica that writes
        self._closing = False
        self._thread: threading.Thread | None = None
        self._lock: locks.Flock | None = None
        self._entered = False
        self._history = 0
        self._noted = 0  # the last step of which a snapshot was asked for
        self._whole = 0  # the last step that ended an update
        self.written = 0  # the step of the last one that was seen complete

    # --- the training thread

    def enter(self, begins: int) -> None:
        """This replica contributes: from now on the directory is its job's. `begins`: the history that it begins
        together with all others; 0: it joins. Raises CheckpointError, OSError."""
        if not self._entered:
            self.options.path.mkdir(parents=True, exist_ok=True)
            if self._settings.rank == 0:
                owner = f"job {self._settings.job} (coordinator {self._settings.coordinator})"
                self._lock = locks.hold(self.options.path, owner)
            self._entered = True
        if begins and self._settings.rank == 0:
            histories.begin(self.options.path, begins)
        self._history = begins or histories.running(self.options.path)

    def stepped(self, commit: Commit, whole: bool) -> None:
        """The update of a step has run. `whole`: no gradients wait for an update that takes several steps."""
        before, every = self._whole, self.options.steps
        if not whole:
            return
        self._whole = commit.step
        due = commit.checkpoint or self._again
        due = due or (every > 0 and commit.step // every > (before or commit.step - 1) // every)
        due = due or (commit.last and self.options.at_end)
        if due and commit.verdict.value != "fail":
            self._begin(commit.step, commit.contributors, commit)

    def replayed(self, step: int, whole: bool) -> None:
        self._whole = step if whole else self._whole

    def holds(self, step: int) -> None:
        """The job stands behind this step, and may end there: its state is worth a checkpoint."""
        epoch = self._here()
        if epoch is not None and step > max(self._noted, self.written) and step == self._whole:
            self._begin(step, epoch.names(), None)

    def _begin(self, step: int, contributors: tuple[str, ...], commit: Commit | None) -> None:
        order = order_of(step, self.options.steps, contributors, self._lives())
        with self._changed:
            busy = self._working
            last = commit is not None and commit.last  # it waits its turn: nobody is in a hurry any more
            if busy is not None and busy.borrower.held is not None and self._writes(busy) and not last:
                log.warning("no checkpoint of step %d: that of step %d is still being written", step, busy.order.step)
                return
            borrower = Borrower(step, patience=PATIENCE)
            self._task = Task(order, self._history, commit, borrower, time.monotonic())
            self._again, self._noted = False, step
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftar-checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._shelf.borrow(borrower)

    def finish(self, *, wait: bool) -> None:
        """The member has ended. `wait`: the job has, so what is due is to be completed before this process goes."""
        by = time.monotonic() + END_S
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._task is None and self._working is None, max(0.0, by - time.monotonic())
                )
            else:  # at least what is being written here
                self._task = None
                self._changed.wait_for(lambda: self._working is None or not self._writes(self._working), 30.0)
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5.0)
        if self._lock is not None:
            self._lock.close()

    # --- its own thread

    def _run(self) -> None:
        writing.nice()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._task is not None)
                task, self._task = self._task, None
                self._working = task
                if self._closing or task is None:
                    return
            try:
                held = self._snapshot(task)
                if held is not None:
                    passes("checkpoint-copied", task.order.step)
                    self._keep(task, held)
            except Exception as error:  # noqa: BLE001  # training goes on, whatever a disk does
                self._failed(task, error)
            finally:
                self._shelf.give_back(task.borrower)
                with self._changed:
                    self._working = None
                    self._changed.notify_all()

    def _snapshot(self, task: Task) -> Held | None:
        """Wait for the copy. None if it was not made."""
        borrower = task.borrower
        with self._shelf.changed:
            while borrower.held is None and not borrower.missed and not self._superseded():
                self._shelf.changed.wait(LOOK_S)
        if borrower.held is not None or self._superseded():
            return borrower.held
        if self._first(task):
            log.warning("no snapshot after step %d (%s): again behind the next", task.order.step, borrower.missed)
            self._again = True
        return None

    def _keep(self, task: Task, held: Held) -> None:
        """Until it is on disk, or a newer one takes its place."""
        target = self._target(task)
        seen, since = self._progress(task), time.monotonic()
        while not self._superseded():
            if histories.stands(writing.found_at(target), task.history):
                self.written = max(self.written, task.order.step)
                return
            found, now = self._progress(task), time.monotonic()
            if found != seen:
                seen, since = found, now
            if self._settings.rank == 0:
                if is_mine(task.order, self._me(), self._lives(), now - since, self.options.takeover_s):
                    self._write(task, held, target)
                    return
            elif (target.path / writing.LOCK).exists() and not target.rank_metadata(self._settings.rank).exists():
                writing.write_part(target, writing.state_of(held.state, self._names))
                while target.path.exists() and not self._closing:
                    time.sleep(LOOK_S)
                return
            with self._changed:
                self._changed.wait_for(self._superseded, LOOK_S)

    def _write(self, task: Task, held: Held, target: writing.Target) -> None:
        with writing.begun(target) as lock:
            flat = writing.state_of(held.state, self._names)
            writing.write_part(target, flat)
            writing.wait_for_ranks(target, self.options.takeover_s, self._superseded)
            writing.join(target)
            passes("checkpoint-joined", task.order.step)
            manifest = writing.publish(target, lock, lambda files: self._manifest(task, flat, files))
        step = self.written = task.order.step
        log.info(
            "checkpoint of step %d: %s (%d bytes, %.2f s)", step, target.complete, manifest.nbytes, manifest.seconds
        )
        notice = CheckpointNotice(
            step=step, seconds=manifest.seconds, bytes=manifest.nbytes, path=str(target.complete)[:500]
        )
        self._tell(notice)
        self._journal.write(
            "checkpoint", {"step": step, "bytes": manifest.nbytes, "seconds": manifest.seconds, "path": notice.path}
        )
        writing.tidy(self.options.path, self.options.keep)

    def _manifest(self, task: Task, flat: tree.Flat, files: dict[str, Any]) -> Manifest:
        commit, data = task.commit, flat.values.get("data")
        held = task.borrower.held
        epoch = commit.epoch if commit is not None else held.epoch if held is not None else None
        return Manifest(
            ftar_core=ftar_core.__version__,
            torch=writing.torch_version(),
            job=self._settings.job,
            step=task.order.step,
            term=epoch.term.number if epoch is not None else 0,
            epoch=epoch.number if epoch is not None else 0,
            contributors=commit.contributors if commit is not None else tuple(name for name, _ in task.order.lives),
            replica=self._settings.replica,
            ranks=self._settings.world_size,
            written=time.time(),
            seconds=time.monotonic() - task.began,
            data=data if isinstance(data, dict) else {},
            rng=RNG,
            files=files,
            history=task.history,
        )

    def _failed(self, task: Task, error: Exception) -> None:
        of_system = _of_system(error)
        if of_system is not None:
            reason = f"{of_system.filename or self.options.path}: {of_system.strerror or of_system}"
        elif isinstance(error, FtarError):
            reason = str(error)
        else:
            log.exception("checkpoint of step %d", task.order.step)
            reason = f"{type(error).__name__}: {error}"
        log.warning("no checkpoint of step %d: %s; training goes on", task.order.step, reason)
        self._tell(CheckpointNotice(step=task.order.step, problem=reason[:500], path=str(self.options.path)[:500]))
        self._journal.write("checkpoint-failed", {"step": task.order.step, "reason": reason})

    # --- who and where

    def _superseded(self) -> bool:
        return self._closing or self._task is not None

    def _first(self, task: Task) -> bool:
        return is_mine(task.order, self._me(), self._lives(), 0.0, self.options.takeover_s)

    def _writes(self, task: Task) -> bool:
        return self._target(task).path.exists()

    def _me(self) -> tuple[str, int]:
        return self._settings.replica, self._incarnation()

    def _lives(self) -> Mapping[str, int]:
        epoch = self._here()
        return {member.replica: member.incarnation for member in epoch.members} if epoch is not None else {}

    def _target(self, task: Task) -> writing.Target:
        me, settings = self._me(), self._settings
        return writing.Target(self.options.path, task.order.step, *me, settings.rank, settings.world_size)

    def _progress(self, task: Task) -> object:
        """Of anybody who writes this checkpoint."""
        directory, step = self.options.path, task.order.step
        return [writing.progress_of(directory / part_name(step, name, life)) for name, life in task.order.lives]


def _of_system(error: BaseException | None) -> OSError | None:
    """What a disk has said: torch raises an error of its own on the way out of a file that could not be written."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
