"""Checkpoints of one rank, beside its training: when one is due, the snapshot, and who writes it.

    due -> copying -> kept -> (compared, written here | complete by another's hand) -> forgotten
              `-> missed: the next step, if this replica is the one that writes

The training thread only says that a step is committed and asks the shelf for a copy, as a replica that catches up would
(shelf.py, snapshots.py): it is made beside the training, and an update waits for it no longer than a small share of a
step. Everything else happens in a thread of this file, which gives way to the training. It fails for itself: whatever
goes wrong with a disk costs a checkpoint, and a line and an event that say why; the next one is tried when it is due.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ftar_core
from ftar_core.errors import CheckpointError, FtarError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.settings import Settings
from ftar_core.training.checkpoints import histories, locks, tree, votes, writing
from ftar_core.training.checkpoints.layout import Manifest, part_name
from ftar_core.training.checkpoints.options import Checkpoint
from ftar_core.training.checkpoints.turns import Order, is_mine, order_of
from ftar_core.training.journal import Journal
from ftar_core.training.shelf import Borrower, Shelf
from ftar_core.training.snapshots import Held
from ftar_core.wire.messages import CheckpointNotice, Commit, EpochInfo, Message

log = logging.getLogger("ftar.checkpoint")
PATIENCE = 0.05  # of a step: so long may an update wait for a snapshot from the first try on
LOOK_S, SOON_S = 0.2, 0.02
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
    alone: bool = False  # tried again behind another step: the others have no snapshot of it


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
        due = commit.checkpoint or (every > 0 and commit.step // every > (before or commit.step - 1) // every)
        due = due or (commit.last and self.options.at_end)
        if (due or self._again) and commit.verdict.value != "fail":
            self._begin(commit.step, commit.contributors, commit, alone=not due)

    def replayed(self, step: int, whole: bool) -> None:
        self._whole = step if whole else self._whole

    def holds(self, step: int) -> None:
        """The job stands behind this step, and may end there: its state is worth a checkpoint."""
        epoch = self._here()
        if epoch is not None and step > max(self._noted, self.written) and step == self._whole:
            self._begin(step, epoch.names(), None)

    def _begin(self, step: int, contributors: tuple[str, ...], commit: Commit | None, *, alone: bool = False) -> None:
        order = order_of(step, self.options.steps, contributors, self._lives())
        if alone:
            order = Order(step, (self._me(),))
        with self._changed:
            busy = self._working
            last = commit is not None and commit.last  # it waits its turn: nobody is in a hurry any more
            mine = busy is not None and busy.borrower.held is not None and (self._first(busy) or self._writes(busy))
            if busy is not None and mine and not last:
                log.warning("no checkpoint of step %d: that of step %d is still being written", step, busy.order.step)
                mute = Task(order, self._history, commit, Borrower(step), time.monotonic(), alone)
                threading.Thread(target=self._vote, args=(mute, None), daemon=True).start()  # nobody waits for it
                return
            borrower = Borrower(step, patience=PATIENCE)
            self._task = Task(order, self._history, commit, borrower, time.monotonic(), alone)
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
                self._vote(task, held)
                if held is not None:
                    passes("checkpoint-copied", task.order.step)
                    self._keep(task, held)
                else:
                    self._missed(task)
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
        return borrower.held

    def _missed(self, task: Task) -> None:
        """There is no snapshot here. If nobody else has one either, the first in the order tries again."""
        box, by = self._box(task), time.monotonic() + votes.PATIENCE_S
        me, others = self._me(), [life for life in task.order.lives if life != self._me()]
        if not self._first(task) or me not in task.order.lives:
            return
        while not self._superseded() and time.monotonic() < by:
            here = self._lives()
            if all(here.get(life[0]) != life[1] or box.is_out(life) for life in others):
                break
            if any(box.of(life, self._settings.world_size) and not box.is_out(life) for life in others):
                return
            with self._changed:
                self._changed.wait_for(self._superseded, SOON_S)
        if not self._superseded():
            log.warning("no snapshot after step %d (%s): again behind the next", task.order.step, task.borrower.missed)
            self._again = True

    def _vote(self, task: Task, held: Held | None) -> None:
        """Tell the others what is here. A disk that cannot take it is told of by who writes."""
        me, box = self._me(), self._box(task)
        if task.alone or len(task.order.lives) < 2 or me not in task.order.lives:
            return
        try:
            box.cast(me, self._settings.rank, held.whole().hex() if held is not None else votes.MISSED)
            if held is None:
                box.step_out(me)
        except OSError:
            if self._first(task):
                raise

    def _keep(self, task: Task, held: Held) -> None:
        """Until it is on disk, or a newer one takes its place."""
        target, box = self._target(task), self._box(task)
        copied = time.monotonic()
        seen, since = self._progress(task), time.monotonic()
        while not self._superseded():
            if histories.stands(writing.found_at(target), task.history):
                self.written = max(self.written, task.order.step)
                return
            found, now, wait_s = self._progress(task), time.monotonic(), LOOK_S
            if found != seen:
                seen, since = found, now
            if self._settings.rank == 0:
                idle_s, options = now - since, self.options
                if box.given_up:
                    return
                if is_mine(task.order, self._me(), self._lives(), idle_s, options.takeover_s, out=box.is_out):
                    agreed = task.alone or self._compare(task, box, late=now - copied > votes.PATIENCE_S)
                    if agreed:
                        self._write(task, held, target)
                    if agreed is not None:
                        return
                    wait_s = SOON_S
            elif (target.path / writing.LOCK).exists() and not target.rank_metadata(self._settings.rank).exists():
                writing.write_part(target, writing.state_of(held.state, self._names))
                while target.path.exists() and not self._closing:
                    time.sleep(LOOK_S)
                return
            with self._changed:
                self._changed.wait_for(self._superseded, wait_s)

    def _compare(self, task: Task, box: votes.Box, *, late: bool) -> bool | None:
        """Is this replica's snapshot what the others have, too? None: not all have said so yet. Raises CheckpointError
        if they differ and nobody can say whose is right, OSError."""
        here, ranks = self._lives(), self._settings.world_size
        if box.is_out(self._me()):  # another rank has no snapshot
            return False
        told = {life: ballot for life in task.order.lives if (ballot := box.of(life, ranks)) is not None}
        waited_for = [life for life in task.order.lives if here.get(life[0]) == life[1] and life not in told]
        if len(task.order.lives) > 1 and waited_for and not late:
            return None
        verdict = votes.judge(told)
        if not verdict.clear:
            box.give_up()
            who = ", ".join(sorted(name for name, _ in verdict.odd))
            raise CheckpointError(f"the states of {who} differ, and nobody can say whose is right")
        if self._me() not in verdict.odd:
            return True
        log.warning("step %d: the state here is not that of the others: another replica writes it", task.order.step)
        self._journal.write("checkpoint-odd", {"step": task.order.step})
        box.step_out(self._me())
        return False

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
        votes.forget(self.options.path, os.listdir(self.options.path), task.history, step)

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

    def _box(self, task: Task) -> votes.Box:
        return votes.Box(self.options.path, task.order.step, task.history)

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
