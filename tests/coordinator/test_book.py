"""Where the time went outlives the coordinator, and a file that cannot be read costs nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from ftar_core.coordinator.book import LONGEST_GAP_S, MAX_FILE_BYTES, SAVE_S, Book, parse
from ftar_core.coordinator.store import FileStore
from ftar_core.protocol.accounting import Saved
from ftar_core.wire.accounting import Category, Loss, Spent
from ftar_core.wire.messages import CheckpointNotice, CheckpointView


@dataclass
class Hands:
    """A clock set by hand."""

    mono: float = 1000.0
    wall: float = 1_700_000_000.0

    def now(self) -> float:
        return self.mono

    def time(self) -> float:
        return self.wall

    def pass_s(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds


def open_store(path: Path) -> tuple[FileStore, bool]:
    store = FileStore(path, "job")
    return store, store.claim().fresh


def train(book: Book, clock: Hands, steps: int, first: int = 1) -> None:
    if first == 1:
        clock.pass_s(1.0)
        book.accounting.begins(1, clock.now())
        book.accounting.stand(None, clock.now())
    for step in range(first, first + steps):
        clock.pass_s(0.1)
        book.accounting.committed(step, 2, clock.now())


def seconds(book: Book, category: Category, cause: Loss | None = None) -> float:
    spent = book.accounting.view(book._clock.now(), book._clock.time()).spent
    return sum(s.us for s in spent if (s.category, s.cause) == (category, cause)) / 1e6


@pytest.fixture
def clock() -> Hands:
    return Hands()


def a_life(path: Path, clock: Hands, steps: int = 21) -> Book:
    store, fresh = open_store(path)
    book = Book(store, 2, clock, fresh=fresh)
    train(book, clock, steps)
    book.save()
    return book


def another(path: Path, clock: Hands) -> Book:
    """The next life; the store has a record by now, so it is not fresh."""
    store, _fresh = open_store(path)
    return Book(store, 2, clock, fresh=False)


def test_the_next_life_goes_on_and_the_time_between_is_the_coordinators(tmp_path: Path, clock: Hands) -> None:
    first = a_life(tmp_path, clock)
    clock.pass_s(30)
    clock.wall -= 3600  # somebody has set the date; CLOCK_MONOTONIC knows better
    book = another(tmp_path, clock)
    book.accounting.begins(22, clock.now())
    assert seconds(book, Category.PRODUCTIVE) == seconds(first, Category.PRODUCTIVE) == 2.0
    assert seconds(book, Category.STALLED, Loss.COORDINATOR) == pytest.approx(30.0)


def test_after_a_reboot_the_date_says_how_long_it_was(
    tmp_path: Path, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_life(tmp_path, clock)
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr("ftar_core.coordinator.book.BOOT_ID", boot)
    clock.wall += 500
    clock.mono = 20.0
    book = another(tmp_path, clock)
    book.accounting.begins(22, clock.now())
    assert seconds(book, Category.STALLED, Loss.COORDINATOR) == pytest.approx(500.0)
    book.save()
    boot.write_text("and another\n")
    clock.wall -= 10_000  # the date is of no use: at least it is not counted backwards
    assert another(tmp_path, clock).accounting.uncounted_us() == 0
    clock.wall += 1e9  # or that somebody waited for 30 years
    assert another(tmp_path, clock).accounting.uncounted_us() == LONGEST_GAP_S * 1_000_000


def test_it_is_saved_now_and_then_and_dashboards_see_what_was_saved(tmp_path: Path, clock: Hands) -> None:
    book = a_life(tmp_path, clock)
    shown = book.shown
    train(book, clock, int(SAVE_S / 0.1) - 1, first=22)
    book.keep()
    assert book.shown is shown
    clock.pass_s(0.2)
    book.keep()
    assert book.shown.total_us > shown.total_us
    # Killed: the next one begins with what dashboards have seen.
    assert another(tmp_path, clock).shown.spent[:2] == book.shown.spent[:2]


def test_the_next_life_knows_the_checkpoints_of_this_one(tmp_path: Path, clock: Hands) -> None:
    book = a_life(tmp_path, clock)
    assert book.shown_kept == CheckpointView()
    book.kept.told(CheckpointNotice(step=20, path="/k/step-20", seconds=0.5, bytes=4000), "r1", clock.now())
    clock.pass_s(7.0)
    book.kept.told(CheckpointNotice(step=30, path="/k", problem="/k: No space left on device"), "r2", clock.now())
    assert book.shown_kept == CheckpointView(), "dashboards see what was saved"
    book.save()
    clock.pass_s(60.0)
    kept = another(tmp_path, clock).shown_kept
    assert kept == book.shown_kept
    assert clock.time() - kept.time == pytest.approx(67.0)
    assert (kept.step, kept.bytes, kept.failed_step, kept.failures) == (20, 4000, 30, 1)
    assert kept.failed == "r2: /k: No space left on device"
    store, _ = open_store(tmp_path)
    assert Book(store, 2, clock, fresh=True).shown_kept == CheckpointView(), "another job's"


def test_a_replaced_coordinator_writes_nothing_more(tmp_path: Path, clock: Hands) -> None:
    old = a_life(tmp_path, clock)
    new = another(tmp_path, clock)
    new.save()
    kept = (tmp_path / "accounting.json").read_bytes()
    train(old, clock, 5, first=22)
    old.save()
    assert (tmp_path / "accounting.json").read_bytes() == kept


GOOD = Saved(since=1.0, spent=(Spent(category=Category.PRODUCTIVE, us=5, count=1),), step=1, high=1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\x00" * 100, "malformed"),
        (msgspec.json.encode(GOOD)[:-9], "truncated"),
        (b'{"since": 1}', "missing required field"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, format=7)), "format 7"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, step=2)), "cannot be"),
        (
            msgspec.json.encode(msgspec.structs.replace(GOOD, spent=(Spent(category=Category.SLOW, us=-1),))),
            "cannot be",
        ),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, spent=GOOD.spent * 2)), "twice"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, calm_us=(1,) * 99)), "more than"),
        (b" " * (MAX_FILE_BYTES + 1), "bytes"),
        (b"[" * 100_000, "Expected"),
    ],
)
def test_a_file_that_is_not_one_is_put_aside(tmp_path: Path, clock: Hands, data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(data)
    (tmp_path / "accounting.json").write_bytes(data)
    book = a_life(tmp_path, clock)
    assert seconds(book, Category.PRODUCTIVE) == 2.0
    assert (tmp_path / "accounting.json.unreadable").read_bytes() == data
    assert parse((tmp_path / "accounting.json").read_bytes()).high == 21


def test_a_disk_that_is_full_is_said_once_and_nothing_ends(
    tmp_path: Path, clock: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    book = a_life(tmp_path, clock)
    (tmp_path / "accounting.json.new").mkdir()  # cannot be written
    os.chmod(tmp_path / "accounting.json.new", 0o500)
    for _ in range(3):
        train(book, clock, 1, first=22)
        book.save()
    assert sum("is not written" in record.message for record in caplog.records) == 1
