"""The journal: whole lines, never in the way of training."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from ftar_core.training.journal import Journal, StallMeter


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lives_of_a_replica_follow_each_other_in_one_file(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        journal = Journal(tmp_path, "r0")
        journal.write("start", {"incarnation": incarnation})
        journal.close()
    found = lines(tmp_path / "r0.jsonl")
    assert [line["incarnation"] for line in found] == [1, 2]
    assert all({"kind", "time", "mono"} <= set(line) for line in found)


def test_a_torn_last_line_of_a_killed_process_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "r0.jsonl"
    path.write_text('{"kind": "step", "st')
    Journal(tmp_path, "r0").write("start", {"incarnation": 2})
    assert json.loads(path.read_text().splitlines()[-1])["incarnation"] == 2


def test_not_a_number_is_null_in_json(tmp_path: Path) -> None:
    Journal(tmp_path, "r0").write("step", {"loss": float("nan"), "stall_ms": float("inf")})
    (line,) = lines(tmp_path / "r0.jsonl")
    assert line["loss"] is None
    assert line["stall_ms"] is None


def test_a_full_disk_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, "r0")
    journal.write("start", {})
    write, full, room = os.write, True, 5

    def limited(fd: int, data: bytes) -> int:
        nonlocal room
        if full and room == 0:
            raise OSError(28, "No space left on device")
        if full:
            room = 0
            return write(fd, data[:5])  # the kernel takes what fits
        return write(fd, data)

    monkeypatch.setattr(os, "write", limited)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            journal.write("step", {"step": step})
        assert len(caplog.records) == 1
        assert "No space left on device" in caplog.text
        full = False
        journal.write("step", {"step": 5})
    last = (tmp_path / "r0.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["lines_missing"] == 5


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    Journal(None, "r0").write("step", {})
    assert list(tmp_path.iterdir()) == []


def test_stall_is_what_a_step_waits_longer_than_calm_ones() -> None:
    meter = StallMeter()
    for step in range(25):
        stall = meter.measure(step, step + 0.010, calm=True)
    assert stall == pytest.approx(0, abs=1e-6)
    assert meter.measure(100.0, 100.350, calm=False) == pytest.approx(340, abs=1)
    assert meter.measure(101.0, 101.010, calm=True) == pytest.approx(0, abs=1e-6), "a stall is no calm step"


def test_too_few_calm_steps_are_no_measure() -> None:
    meter = StallMeter()
    assert all(meter.measure(0, 1, calm=True) is None for _ in range(5))
    assert meter.measure(0, 1, calm=True) == 0
