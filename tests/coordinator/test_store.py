"""The store through its worst days: two claimants, torn files, a full disk, a stuck lock, somebody's rm -rf."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from ftar_core.coordinator import store as store_module
from ftar_core.coordinator.store import FileStore, StoreUnknown
from ftar_core.errors import FencedError, StoreError
from ftar_core.protocol.record import Record
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import Deal, Endpoint, EpochInfo, MemberInfo, RankInfo


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


def record(term: Term, number: int = 1, job: str = "demo") -> Record:
    endpoint = Endpoint(rail="lo", addr="127.0.0.1", port=4000)
    ranks = (RankInfo(rank=0, node="n", links=(endpoint,), state=(endpoint,)),)
    member = MemberInfo(replica="r0", incarnation=5, slot=0, ranks=ranks)
    return Record(
        job=job,
        term=term,
        epoch=EpochInfo(id=EpochId(term, number), members=(member,)),
        first_step=3,
        deal=Deal(batches={"r0": 7}, cursor=8, returned=(2,)),
        last_commit_epoch=NO_EPOCH,
        next_incarnation=6,
        slots={"r0": 0},
        cordoned=("r9",),
    )


def test_a_new_job_then_a_restart(place: Path) -> None:
    first = FileStore(place, "demo")
    claim = first.claim()
    assert (claim.term.number, claim.record, claim.fresh) == (1, None, True)
    first.write(record(claim.term))

    again = FileStore(place, "demo").claim()
    assert again.term.number == 2
    assert again.term.coordinator != claim.term.coordinator
    assert again.record == record(claim.term)
    assert not again.fresh


def test_a_coordinator_that_died_before_its_first_epoch_leaves_a_new_job(place: Path) -> None:
    FileStore(place, "demo").claim()
    claim = FileStore(place, "demo").claim()
    assert (claim.term.number, claim.fresh) == (2, True)


def test_a_record_that_was_there_and_is_gone_is_lost_not_new(place: Path) -> None:
    first = FileStore(place, "demo")
    first.write(record(first.claim().term))
    first.record_path.unlink()
    second = FileStore(place, "demo")
    claim = second.claim()
    assert claim.record is None
    assert not claim.fresh
    assert any("lost" in note for note in second.notes)


def test_secrets_of_the_job_are_private(place: Path) -> None:
    store = FileStore(place, "demo")
    store.write(record(store.claim().term))
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    for name in ("claim.json", "record.json", "lock"):
        assert stat.S_IMODE((place / name).stat().st_mode) == 0o600


def test_the_older_of_two_is_fenced(place: Path) -> None:
    old, new = FileStore(place, "demo"), FileStore(place, "demo")
    old.write(record(old.claim().term))
    old.check()
    claim = new.claim()
    with pytest.raises(FencedError, match="newer coordinator"):
        old.check()
    with pytest.raises(FencedError):
        old.write(record(claim.term, 9))
    with pytest.raises(FencedError):
        old.raise_floor(50)
    new.check()
    new.write(record(claim.term, 2))
    last = FileStore(place, "demo").claim()
    assert last.record == record(claim.term, 2)
    assert last.term.number == 3


def test_terms_rise_above_what_members_promised_elsewhere(place: Path) -> None:
    store = FileStore(place, "demo")
    store.claim()
    store.raise_floor(41)
    store.raise_floor(7)
    assert FileStore(place, "demo").claim().term.number == 42
    assert FileStore(place, "demo").claim().term.number == 43


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\0" * len(data),
        lambda data: data.replace(b'"first_step":3', b'"first_step":4'),
        lambda data: data.replace(b"demo", b"dema"),
        lambda data: msgspec.json.encode({"digest": "", "record": {}}),
        lambda data: b"[" * 100_000,
    ],
)
def test_a_damaged_record_stops_the_start_until_an_operator_says_so(place: Path, damage: object) -> None:
    store = FileStore(place, "demo")
    store.write(record(store.claim().term))
    data = store.record_path.read_bytes()
    store.record_path.write_bytes(damage(data))  # type: ignore[operator]
    before = sorted(p.name for p in place.iterdir())
    with pytest.raises(StoreError, match=r"record\.json: the record cannot be read") as caught:
        FileStore(place, "demo").claim()
    assert "--record-lost" in caught.value.hint
    assert sorted(p.name for p in place.iterdir()) == before
    store.check()  # and the living one was not fenced by the failed start

    told = FileStore(place, "demo")
    claim = told.claim(record_lost=True)
    assert claim.record is None
    assert not claim.fresh
    assert (place / "record.json.before-term-2").exists()
    assert FileStore(place, "demo").claim().fresh is False  # no flag needed a second time


def test_record_lost_does_not_throw_a_good_record_away(place: Path) -> None:
    store = FileStore(place, "demo")
    store.write(record(store.claim().term))
    with pytest.raises(StoreError, match="readable"):
        FileStore(place, "demo").claim(record_lost=True)
    assert store.record_path.exists()


def test_a_damaged_claim_stops_the_start_until_an_operator_says_so(place: Path) -> None:
    store = FileStore(place, "demo")
    store.write(record(store.claim().term))
    store.claim_path.write_text("{")
    store.record_path.unlink()
    with pytest.raises(StoreError, match=r"claim\.json"):
        FileStore(place, "demo").claim()
    claim = FileStore(place, "demo").claim(record_lost=True)
    assert not claim.fresh


def test_new_puts_the_old_job_aside(place: Path) -> None:
    store = FileStore(place, "demo")
    store.write(record(store.claim().term))
    fresh = FileStore(place, "demo")
    claim = fresh.claim(new=True)
    assert (claim.term.number, claim.record, claim.fresh) == (2, None, True)
    assert (place / "record.json.before-term-2").exists()
    assert FileStore(place, "demo").claim().fresh  # still no epoch of the new job


def test_another_jobs_store_is_refused(place: Path) -> None:
    FileStore(place, "demo").claim()
    with pytest.raises(StoreError, match="belongs to job 'demo'"):
        FileStore(place, "other").claim()


def test_a_full_disk_keeps_the_old_record(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(place, "demo")
    claim = store.claim()
    store.write(record(claim.term, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", _fail(errno.ENOSPC))
        with pytest.raises(StoreError, match=r"record\.json: cannot be written: No space left") as caught:
            store.write(record(claim.term, 2))
    assert not isinstance(caught.value, StoreUnknown)
    assert "df -h" in caught.value.hint
    assert not list(place.glob("*.new"))
    store.write(record(claim.term, 3))
    assert FileStore(place, "demo").claim().record == record(claim.term, 3)


def test_a_disk_that_fails_after_the_rename_leaves_it_unknown(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(place, "demo")
    claim = store.claim()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnknown):
        store.write(record(claim.term, 2))


def test_a_store_that_was_removed_is_said_to_be(place: Path) -> None:
    store = FileStore(place, "demo")
    claim = store.claim()
    shutil.rmtree(place)
    store.check()  # commits within the epoch need no store
    with pytest.raises(StoreError, match="lock"):
        store.write(record(claim.term))
    place.mkdir()
    with pytest.raises(StoreError, match="removed the store"):
        store.write(record(claim.term))


def test_a_stuck_lock_is_an_error_in_bounded_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_WAIT_S", 0.05)
    store = FileStore(place, "demo")
    claim = store.claim()
    with (place / "lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process holds the lock"):
            store.write(record(claim.term))
    store.write(record(claim.term))


def test_no_directory_no_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreError, match="not a directory"):
        FileStore(file, "demo").claim()
    with pytest.raises(StoreError, match="cannot be made"):
        FileStore(file / "below", "demo").claim()


def _fail(number: int) -> object:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail
