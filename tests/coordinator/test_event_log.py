"""Events are numbered through restarts, bounded in memory and on disk, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftar_core.coordinator import events as events_module
from ftar_core.coordinator.events import EventLog
from ftar_core.wire.messages import EventView


def event(text: str) -> EventView:
    return EventView(seq=0, time=0.0, source="coordinator", kind="replica.lost", object="r1", reason=text)


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    assert [log.add(event(t), 10.0).seq for t in "abc"] == [1, 2, 3]
    log.close()
    with path.open("ab") as file:
        file.write(b'{"seq": 4, "ti')  # the crash
    log = EventLog(path)
    assert log.add(event("d"), 11.0).seq == 4
    log.close()
    log = EventLog(path)
    assert [(e.seq, e.reason, e.time) for e in log.after(2)] == [(3, "c", 10.0), (4, "d", 11.0)]
    assert log.after(4) == ()
    log.close()
    assert path.stat().st_mode & 0o077 == 0


def test_bounded_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_FILE_BYTES", 5_000)
    monkeypatch.setattr(events_module, "KEEP", 50)
    monkeypatch.setattr(events_module, "REPLY_LIMIT", 20)
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(200):
        log.add(event(str(number)), float(number))
    assert [e.seq for e in log.after(0)] == list(range(151, 171))
    assert [e.seq for e in log.after(170)] == list(range(171, 191))
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(p.stat().st_size <= 5_000 for p in tmp_path.iterdir())
    log = EventLog(tmp_path / "events.jsonl")
    assert log.add(event("next"), 0.0).seq == 201
    log.close()


def test_a_file_that_cannot_be_written_costs_only_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").mkdir()
    log = EventLog(tmp_path / "events.jsonl")
    for text in "ab":
        log.add(event(text), 1.0)
    assert [e.reason for e in log.after(0)] == ["a", "b"]
    assert len(caplog.records) == 1
    log.close()


def test_a_full_disk_is_said_once_and_over_when_it_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    assert [log.add(event(t), 1.0).seq for t in "abc"] == [1, 2, 3]
    assert [e.reason for e in log.after(0)] == ["a", "b", "c"]
    assert ["No space left" in r.getMessage() for r in caplog.records] == [True]
    log.close()
    path.unlink()
    assert log.add(event("d"), 1.0).seq == 4
    log.close()
    assert [e.seq for e in EventLog(path).after(0)] == [4]
