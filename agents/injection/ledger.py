"""Faults on disk: one JSON file each under STATE/ledger, written before the fault is made.

A file is written under another name, fsynced, renamed, and the directory fsynced (rename(2), fsync(2)): after a crash
there is the old entry or the new one, never half of one. A leftover `.new` file never had its fault made, because the
rename comes first, and is removed. An entry that cannot be read is reported with its reason and stays where it is: a
fault may be in force, and a person must look.

Agent, watchdog and a second agent take turns by flock(2) on STATE/ledger/lock: the kernel drops the lock of a killed
process. Whoever has it reads the entry again before touching it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.api.words import FaultState
from agents.faults.contract import Params, Target
from agents.injection.lifecycle import OPEN

VERSION = 1
MAX_ENTRY_BYTES = 64 * 2**20
KEEP_REVERTED_S = 3600.0
KEEP_REVERTED = 200
LOCK_POLL_S = 0.02
SUFFIX = ".json"
UNFINISHED = ".new"


class LedgerError(Exception):
    """The ledger could not be written or locked; the message names the file and the reason."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault. `_boot_s` times are CLOCK_BOOTTIME and mean something only while `boot_id` is the machine's."""

    version: int = VERSION
    id: str
    kind: str
    target: Target
    params: Params = {}
    owner: str
    reason: str = ""
    request_id: str = ""
    created: float  # unix seconds, for people
    duration_s: float
    boot_id: str
    created_boot_s: float
    deadline_boot_s: float
    dead_man_s: float | None = None
    heard_boot_s: float = 0.0  # when the controller was last heard
    state: FaultState
    detail: str = ""
    attempts: int = 0  # of the revert under way
    reverted: float | None = None  # unix seconds, for people
    over_boot_s: float | None = None  # when it was reverted, or done if nothing can take it back
    irreversible: bool = False
    warning: str = ""  # where it may not hit what a user expects
    undo: msgspec.Raw

    @property
    def open(self) -> bool:
        return self.state in OPEN

    def due_boot_s(self) -> float:
        """When it must be taken back: at its deadline, or when its controller was silent for too long."""
        if self.dead_man_s is None:
            return self.deadline_boot_s
        return min(self.deadline_boot_s, self.heard_boot_s + self.dead_man_s)


@dataclass(frozen=True)
class Damaged:
    """An entry that cannot be read."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Content:
    entries: tuple[Entry, ...]  # oldest first
    damaged: tuple[Damaged, ...]


class Ledger:
    """The directory. Writing and pruning want the lock (`locked`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self) -> None:
        """Make the directory and drop unfinished files. Raises LedgerError."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.locked(timeout_s=10):
                for path in self.directory.glob(f"*{UNFINISHED}"):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise LedgerError(f"{self.directory}: {error.strerror}") from None

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Holds the lock, across processes and threads. Raises LedgerError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        try:
            handle = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerError(f"{self.directory}/lock: {error.strerror}") from None
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                        raise LedgerError(f"{self.directory}/lock: {error.strerror}") from None
                if time.monotonic() >= deadline:
                    text = f"{self.directory}/lock: held by another process for more than {timeout_s:g} s"
                    raise LedgerError(text)
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    def write(self, entry: Entry) -> None:
        """Durably, or LedgerError and the old entry (or none) is still there."""
        path = self.directory / (entry.id + SUFFIX)
        unfinished = self.directory / (entry.id + UNFINISHED)
        try:
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                data = memoryview(msgspec.json.format(msgspec.json.encode(entry), indent=1))
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(unfinished, path)
            self._sync_directory()
        except OSError as error:
            try:
                unfinished.unlink(missing_ok=True)
            except OSError:
                pass
            raise LedgerError(f"{path}: {error.strerror}") from None

    def remove(self, fault_id: str) -> None:
        try:
            (self.directory / (fault_id + SUFFIX)).unlink(missing_ok=True)
            self._sync_directory()
        except OSError as error:
            raise LedgerError(f"{self.directory}/{fault_id}{SUFFIX}: {error.strerror}") from None

    def read(self) -> Content:
        """All there is. Raises LedgerError only if the directory itself cannot be read."""
        entries: list[Entry] = []
        damaged: list[Damaged] = []
        try:
            paths = sorted(p for p in self.directory.iterdir() if p.suffix == SUFFIX)
        except OSError as error:
            raise LedgerError(f"{self.directory}: {error.strerror}") from None
        for path in paths:
            try:
                entries.append(_parse(path))
            except FileNotFoundError:
                continue
            except OSError as error:
                damaged.append(Damaged(path, error.strerror or str(error)))
            except (msgspec.DecodeError, ValueError) as error:
                damaged.append(Damaged(path, str(error)))
        return Content(tuple(sorted(entries, key=lambda e: e.created_boot_s)), tuple(damaged))

    def read_one(self, fault_id: str) -> Entry | None:
        """None if there is no such entry. Raises LedgerError if it cannot be read."""
        path = self.directory / (fault_id + SUFFIX)
        try:
            return _parse(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LedgerError(f"{path}: {error.strerror}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise LedgerError(f"{path}: {error}") from None

    def prune(self, entries: tuple[Entry, ...], now_wall_s: float) -> list[Entry]:
        """Forget reverted faults that are old, or too many; returns them."""
        reverted = sorted((e for e in entries if not e.open), key=lambda e: e.reverted or 0.0)
        old = []
        for place, entry in enumerate(reverted):
            if abs(now_wall_s - (entry.reverted or 0.0)) > KEEP_REVERTED_S or place < len(reverted) - KEEP_REVERTED:
                self.remove(entry.id)
                old.append(entry)
        return old

    def _sync_directory(self) -> None:
        handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _parse(path: Path) -> Entry:
    with path.open("rb") as file:
        data = file.read(MAX_ENTRY_BYTES + 1)
    if len(data) > MAX_ENTRY_BYTES:
        raise ValueError("too large for an entry")
    entry = msgspec.json.decode(data, type=Entry)
    if entry.version != VERSION:
        raise ValueError(f"version {entry.version}; this agent knows {VERSION}")
    if entry.id + SUFFIX != path.name:
        raise ValueError(f"holds fault {entry.id}")
    return msgspec.structs.replace(entry, undo=msgspec.Raw(bytes(entry.undo)))
