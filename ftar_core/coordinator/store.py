"""The coordinator's store: a directory with the claim of a term and the record of the job, both fsynced.

    STORE/lock         flock(2) around every read-and-write; held for milliseconds, never for a life
    STORE/claim.json   the newest term; whoever finds another one than its own has been replaced (rules CLAIM, FENCE)
    STORE/record.json  the record (protocol/record.py) with a digest, so that a torn or edited file is seen
    STORE/events.jsonl what happened (events.py)

Every file is replaced whole: temporary file, fsync, rename, fsync of the directory (rename(2), fsync(2)). Until the
rename the old one is intact, so a full disk costs nothing but the new record. Should the last step fail, nobody knows
which of the two a crash would leave; that is StoreUnknown, and the coordinator must end and read again, not go on.

A record that is there but cannot be read is an error, not a loss: starting without it weakens the rules by which a
half-finished step is settled, so an operator has to say so (`--record-lost`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ftar_core.errors import FencedError, StoreError
from ftar_core.protocol.record import FORMAT, Claim, Record
from ftar_core.wire.ids import Term

LOCK_WAIT_S = 2.0  # a healthy holder needs two fsyncs; a coordinator stopped in between must not hang another
MAX_FILE_BYTES = 16 * 1024 * 1024
T = TypeVar("T")


class StoreUnknown(StoreError):
    """The record may or may not be the new one after a crash: end, start again, and read what is there."""

    definite = False


class ClaimFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """claim.json. `fresh`: no record was ever written since the job was new. `floor`: the highest term number that a
    member was seen to have promised itself to; the next term is above it."""

    job: str
    term: Term
    fresh: bool
    floor: int = 0
    host: str = ""
    pid: int = 0
    time: float = 0.0
    format: int = FORMAT


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """record.json: the digest is BLAKE2b-128 of the record's bytes."""

    digest: str
    record: msgspec.Raw


class FileStore:
    """One process's view of a store. `claim` first, then `write` as often as needed."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory = directory
        self.record_path = directory / "record.json"
        self.claim_path = directory / "claim.json"
        self.notes: list[str] = []  # what `claim` found that an operator should know
        self._job = job
        self._id = secrets.token_hex(8)  # once a process: terms are unique over all stores (rule UNIQ)
        self._claim: ClaimFile | None = None
        self._seen = (0, 0)

    def claim(self, *, new: bool = False, record_lost: bool = False) -> Claim:
        """Take a term above all that this store has seen, on disk before anything is said in its name.

        `new` puts an old job's record aside; `record_lost` does so with an unreadable one. Raises StoreError.
        """
        self._make_directory()
        with self._locked():
            old, claim_lost = self._old_claim(record_lost or new)
            record, unreadable = self._old_record(record_lost or new)
            if record_lost and record is not None and not new:
                raise StoreError(
                    f"{self.record_path}: the record is readable, so it is not lost",
                    hint="start again without --record-lost",
                )
            seen = [old.term.number, old.floor] if old else []
            seen += [record.term.number] if record else []
            never_written = old.fresh if old else not (claim_lost or unreadable or record)
            fresh = new or (record is None and not unreadable and never_written)
            term = Term(max(seen, default=0) + 1, self._id)
            claim = ClaimFile(
                job=self._job,
                term=term,
                fresh=fresh,
                floor=old.floor if old else 0,
                host=socket.gethostname(),
                pid=os.getpid(),
                time=time.time(),
            )
            self._write_claim(claim)
            if unreadable or (new and self.record_path.exists()):
                aside = self.record_path.with_name(f"record.json.before-term-{term.number}")
                self._rename(self.record_path, aside)
                self.notes.append(f"the old record was put aside as {aside}")
                record = None
            if record is None and not fresh:
                self.notes.append(
                    "the record is lost: all members of the latest epoch have to come back, or force-quorum"
                )
            return Claim(term=term, record=record, fresh=fresh)

    def write(self, record: Record) -> None:
        """Replace the record; returns when it is on disk. Raises FencedError, StoreError (not written) or
        StoreUnknown."""
        with self._locked():
            mine = self._own_claim()
            body = msgspec.json.encode(record)
            digest = hashlib.blake2b(body, digest_size=16).hexdigest()
            self._replace(self.record_path, msgspec.json.encode(Sealed(digest=digest, record=msgspec.Raw(body))))
            if mine.fresh:
                try:
                    self._write_claim(msgspec.structs.replace(mine, fresh=False))
                except StoreUnknown:
                    raise
                except StoreError:
                    pass  # said again with the next record; until then only the loss of this very record could mislead

    def raise_floor(self, number: int) -> None:
        """Have the next term above `number` (a member has promised itself to it). Raises as `write`."""
        with self._locked():
            mine = self._own_claim()
            if number > max(mine.floor, mine.term.number):
                self._write_claim(msgspec.structs.replace(mine, floor=number))

    def check(self) -> None:
        """Raises FencedError if another coordinator has claimed the store. Cheap: one stat(2) while nothing changed."""
        try:
            seen = self._stat()
            if seen != self._seen:
                self._own_claim()
                self._seen = seen
        except FencedError:
            raise
        except (OSError, StoreError):
            pass  # gone or unreadable: the next `write` says so, and commits within the epoch need no store

    # --- reading ---------------------------------------------------------------------------------------------------

    def _old_claim(self, forgive: bool) -> tuple[ClaimFile | None, bool]:
        """(the claim, False), (None, False) if there is none, (None, True) if it is unreadable and that is forgiven."""
        data = self._read(self.claim_path)
        if data is None:
            return None, False
        try:
            old = msgspec.json.decode(data, type=ClaimFile)
        except (msgspec.DecodeError, ValueError) as error:
            if forgive:
                self.notes.append(f"{self.claim_path} was unreadable ({error}); terms start again from the record's")
                return None, True
            raise StoreError(
                f"{self.claim_path}: cannot be read: {error}",
                hint="restore it from a copy, or start with --record-lost to go on from what the members report",
            ) from None
        if old.job != self._job:
            raise StoreError(
                f"{self.directory}: this store belongs to job {old.job!r}, not {self._job!r}",
                hint="give each job a --store of its own",
            )
        return old, False

    def _old_record(self, forgive: bool) -> tuple[Record | None, bool]:
        """(the record, False), (None, False) if there is none, (None, True) if unreadable and that is forgiven."""
        data = self._read(self.record_path)
        if data is None:
            return None, False
        try:
            return parse_record(data, self._job), False
        except ValueError as error:
            if forgive:
                return None, True
            raise StoreError(
                f"{self.record_path}: the record cannot be read: {error}",
                hint="restore it from a copy, or start with --record-lost to go on from what the members report",
            ) from None

    def _own_claim(self) -> ClaimFile:
        """The claim on disk, which must still be ours."""
        if self._claim is None:
            raise StoreError(f"{self.directory}: nothing was claimed here by this process")
        data = self._read(self.claim_path)
        if data is None:
            raise StoreError(
                f"{self.claim_path}: gone; somebody removed the store",
                hint="start the coordinator again to make a new one",
            )
        try:
            found = msgspec.json.decode(data, type=ClaimFile)
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(
                f"{self.claim_path}: cannot be read: {error}", hint="start the coordinator again"
            ) from None
        if found.term != self._claim.term:
            raise FencedError(
                f"{self.directory}: a newer coordinator (term {found.term.number}, process {found.pid} on {found.host})"
                f" has claimed the store; this one has term {self._claim.term.number}"
            )
        return found

    def _read(self, path: Path) -> bytes | None:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}", hint=f"look at: ls -l {path}") from None
        if len(data) > MAX_FILE_BYTES:
            raise StoreError(f"{path}: more than {MAX_FILE_BYTES} bytes, so it is no file of ours")
        return data

    def _stat(self) -> tuple[int, int]:
        status = self.claim_path.stat()
        return status.st_ino, status.st_mtime_ns

    # --- writing ---------------------------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise StoreError(f"{self.directory}: not a directory", hint="give another --store") from None
        except OSError as error:
            raise StoreError(
                f"{self.directory}: cannot be made: {error.strerror}", hint="give another --store"
            ) from None

    def _write_claim(self, claim: ClaimFile) -> None:
        self._replace(self.claim_path, msgspec.json.encode(claim))
        self._claim = claim
        self._seen = self._stat()

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(path.name + ".new")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(
                f"{path}: cannot be written: {error.strerror}", hint=f"look at: df -h {self.directory}"
            ) from None
        self._rename(temporary, path)

    def _rename(self, source: Path, target: Path) -> None:
        try:
            source.rename(target)
        except OSError as error:
            raise StoreError(
                f"{target}: cannot be written: {error.strerror}", hint=f"look at: ls -ld {target}"
            ) from None
        try:
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreUnknown(
                f"{target}: it is not known whether it was written: {error.strerror}",
                hint=f"check the disk under {self.directory}, then start the coordinator again",
            ) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.directory / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened: {error.strerror}", hint=f"look at: ls -ld {path}") from None
        try:
            give_up = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise StoreError(
                            f"{path}: another process holds the lock for more than {LOCK_WAIT_S:g} s",
                            hint=f"find it with: fuser -v {path}",
                        ) from None
                    time.sleep(0.005)
                except OSError as error:
                    raise StoreError(
                        f"{path}: cannot be locked: {error.strerror}",
                        hint="put the --store on a file system with flock",
                    ) from None
            yield
        finally:
            os.close(descriptor)  # releases the lock


def parse_record(data: bytes, job: str) -> Record:
    """The record in the bytes of record.json. Raises ValueError with the reason."""
    try:
        sealed = msgspec.json.decode(data, type=Sealed)
        body = bytes(sealed.record)
        if hashlib.blake2b(body, digest_size=16).hexdigest() != sealed.digest:
            raise ValueError("its digest does not fit: it was changed or damaged")
        record = msgspec.json.decode(body, type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a record ({error})") from None
    if record.format != FORMAT:
        raise ValueError(f"format {record.format}, this version knows {FORMAT}")
    if record.job != job:
        raise ValueError(f"it is the record of job {record.job!r}, not {job!r}")
    return record
