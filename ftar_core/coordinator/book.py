"""STORE/accounting.json: where the job's time went, and what is known of its checkpoints, for the coordinator's next
life. Replaced every few seconds.

It is for people and their dashboards, never for decisions: it is not fsynced, a file that cannot be read is put aside
and the time counts from then on, and a full disk costs accuracy only (said once). Dashboards are told what was saved
last, not what has been counted since: so no sum they were told becomes smaller when the coordinator is killed.

How long ago the last word was, CLOCK_MONOTONIC tells if the machine has not been started since; else the date does, as
far as it can be trusted: a gap is never negative.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from ftar_core.coordinator.store import FileStore
from ftar_core.errors import FencedError
from ftar_core.protocol.accounting import CALM_STEPS, FORMAT, KNOWN_ABSENT, Accounting, Saved
from ftar_core.protocol.kept import Kept, kept_of
from ftar_core.runtime.clock import Clock
from ftar_core.wire.accounting import AccountView
from ftar_core.wire.views import CheckpointView

log = logging.getLogger("ftar.coordinator")
SAVE_S = 5.0
LONGEST_GAP_S = 30 * 86400.0  # what is more is a date that was wrong
MAX_FILE_BYTES = 4 * 1024 * 1024
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Book:
    """`accounting` is the machine's; `keep` is called often, `close` at the end."""

    def __init__(self, store: FileStore, replicas: int, clock: Clock, *, fresh: bool) -> None:
        """`store`: claimed. `fresh`: it begins anew (protocol/accounting.py)."""
        self._store, self._clock = store, clock
        self._path = store.directory / "accounting.json"
        self._boot = _boot_id()
        self._save_at = clock.now() + SAVE_S
        self._trouble = ""
        saved = self._load()
        gap_s = self._since(saved) if saved is not None else 0.0
        self.accounting = Accounting(clock.now(), replicas, saved, gap_s, fresh=fresh)
        now, wall = clock.now(), clock.time()
        known = saved.checkpoint if saved is not None and not fresh else None
        self.kept = kept_of(known, wall - now) if known is not None else Kept()
        self.shown: AccountView = self.accounting.view(now, wall)  # as last saved
        self.shown_kept: CheckpointView = self.kept.view(wall - now)

    def keep(self) -> None:
        if self._clock.now() >= self._save_at:
            self.save()

    def save(self) -> None:
        now, wall = self._clock.now(), self._clock.time()
        self._save_at = now + SAVE_S
        kept = self.kept.view(wall - now)
        saved = msgspec.structs.replace(self.accounting.saved(now, wall), boot=self._boot, checkpoint=kept)
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            self._store.check()
            temporary.write_bytes(msgspec.json.encode(saved))
            temporary.replace(self._path)
            self._trouble = ""
        except FencedError:
            return  # it is another coordinator's now
        except OSError as error:
            self._note(f"is not written: {error.strerror}")
            with suppress(OSError):
                temporary.unlink()
        self.shown, self.shown_kept = self.accounting.view(now, wall), kept  # no more than the next life has

    def _since(self, saved: Saved) -> float:
        ago = self._clock.now() - saved.mono
        if not self._boot or saved.boot != self._boot or ago < 0:
            ago = self._clock.time() - saved.wall
        return min(max(0.0, ago), LONGEST_GAP_S)

    def _load(self) -> Saved | None:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"cannot be read: {error.strerror}")
            return None
        try:
            return parse(data)
        except ValueError as error:
            aside = self._path.with_name(self._path.name + ".unreadable")
            try:
                self._path.replace(aside)
            except OSError as failure:
                self._note(f"cannot be put aside: {failure.strerror}")
            log.warning(
                "%s cannot be read (%s): the job's time counts from now on; the file is %s", self._path, error, aside
            )
            return None

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s %s", self._path, trouble)


def parse(data: bytes) -> Saved:
    """Raises ValueError with the reason."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    try:
        saved = msgspec.json.decode(data, type=Saved)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if saved.format != FORMAT:
        raise ValueError(f"format {saved.format}, this version knows {FORMAT}")
    numbers = [n for entry in saved.spent for n in (entry.us, entry.count)]
    numbers += [saved.step, saved.high, saved.contributors, *saved.calm_us]
    if saved.checkpoint is not None:
        numbers += [
            saved.checkpoint.step,
            saved.checkpoint.bytes,
            saved.checkpoint.failed_step,
            saved.checkpoint.failures,
        ]
    if min(numbers) < 0 or max(numbers) >= 2**62 or saved.step > saved.high:
        raise ValueError("numbers that cannot be")
    if len({(entry.category, entry.cause) for entry in saved.spent}) < len(saved.spent):
        raise ValueError("an entry is there twice")
    if len(saved.calm_us) > CALM_STEPS or len(saved.absent) > KNOWN_ABSENT:
        raise ValueError("more than a coordinator keeps")
    return saved


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
