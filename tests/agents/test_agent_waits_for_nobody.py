"""A disk, a coordinator or a log that hangs costs its own answer and nobody else's."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_agent import until

from agents import events
from agents.events import EventLog
from agents.http.context import Pool, SharedRead
from agents.problems import ApiProblem


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events.jsonl", "node1")
    yield log
    log.close()


def test_a_disk_that_hangs_stops_no_event(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    write = os.write

    def slow(handle: int, data: bytes) -> int:
        hang.wait(60)
        return write(handle, data)

    monkeypatch.setattr(events.os, "write", slow)
    for number in range(100):
        log.emit("test", "node1", f"event {number}")
    answer = log.after(0, 1000)
    assert len(answer.events) == 100
    hang.set()


def test_a_full_disk_costs_the_file_and_is_said_once(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events.os, "write", _full)
    for number in range(3):
        log.emit("test", "node1", f"event {number}")
    until(lambda: not log._unwritten, "the writer has tried")
    log.close()
    assert len(log.after(0, 10).events) == 3
    assert capsys.readouterr().err.count("No space left") == 1


def _full(_handle: int, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_file_is_bounded_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "ROTATE_BYTES", 2000)
    log = EventLog(tmp_path / "events.jsonl", "node1")
    for number in range(100):
        log.emit("test", "node1", f"event {number}\nwith a second line")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["events.jsonl", "events.jsonl.1"]
    assert all(f.stat().st_size <= 2000 for f in files)
    lines = [json.loads(line) for f in reversed(files) for line in f.read_text().splitlines()]
    assert lines[-1]["seq"] == 100
    assert [line["seq"] for line in lines] == list(range(101 - len(lines), 101))
    assert lines[-1]["reason"] == "event 99 with a second line"


def test_a_call_that_hangs_is_answered_in_time() -> None:
    release = threading.Event()
    pool = Pool("test", deadline_s=0.1)

    async def story() -> str:
        with pytest.raises(ApiProblem) as caught:
            await pool.call("thing", "in-force", release.wait, 20)
        quick = await pool.call("thing", "failed", lambda: "still served")
        assert caught.value.body.code == "in-force"
        assert "it goes on" in caught.value.body.reason
        return quick

    try:
        assert asyncio.run(story()) == "still served"
    finally:
        release.set()
        pool.close()


def test_too_many_calls_are_turned_away() -> None:
    release = threading.Event()
    pool = Pool("test", deadline_s=20)

    async def story() -> None:
        calls = [asyncio.create_task(pool.call("thing", "failed", release.wait, 20)) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(ApiProblem, match="are waiting"):
            await pool.call("thing", "failed", lambda: None)
        release.set()
        await asyncio.gather(*calls)

    try:
        asyncio.run(story())
    finally:
        release.set()
        pool.close()


def test_many_who_ask_the_same_share_one_answer() -> None:
    asked = 0

    async def ask() -> float:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return time.monotonic()

    async def story() -> None:
        shared: SharedRead[float] = SharedRead()
        answers = await asyncio.gather(*(shared.read(ask) for _ in range(20)))
        assert asked == 1
        assert len(set(answers)) == 1
        assert await shared.read(ask) > answers[0], "the next one asks anew"

    asyncio.run(story())
    assert asked == 2
