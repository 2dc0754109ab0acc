"""The audit log: every request for a change, also a refused one, over restarts, bounded, without secrets."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from live_agent import TOKENS, live_agent

from agents import audit
from agents.api.audit import AuditRecord
from agents.audit import AuditLog


def record(number: int = 0, **change: Any) -> AuditRecord:
    base: dict[str, Any] = {"time": 1000.0 + number, "node": "node1", "who": "ann", "source": "10.0.0.9"}
    return AuditRecord(**{**base, "action": "inject", "result": "ok", "why": f"drill {number}", **change})


def test_records_are_there_after_a_restart_and_lines_that_are_none_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    assert AuditLog(path).add(record(1)) == ""
    with path.open("ab") as file:
        file.write(b'{"time": 3, "node"\n\xff\xff\n')
    again = AuditLog(path)
    again.add(record(2))
    assert [r.why for r in again.read(0, 10).records] == ["drill 1", "drill 2"]
    assert [r.why for r in again.read(1001.5, 10).records] == ["drill 2"]
    assert [r.why for r in again.read(0, 1).records] == ["drill 2"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ROTATE_BYTES", 2000)
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(100):
        log.add(record(number))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    assert all(p.stat().st_size <= 2000 for p in tmp_path.iterdir())
    kept = [r.why for r in log.read(0, 1000).records]
    assert kept == [f"drill {number}" for number in range(100)][-len(kept) :]
    assert len(kept) > 8


def test_on_a_full_disk_records_wait_and_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.add(record(1))
    whole = path.read_bytes()
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda handle, data: write(handle, data[:10]))  # there is room for ten bytes
        assert "no space left" in log.add(record(2))
        assert "no space left" in log.add(record(3))
        assert path.read_bytes() == whole, "half a record is none"
        answer = log.read(0, 10)
        assert [r.why for r in answer.records] == ["drill 1", "drill 2", "drill 3"]
        assert "no space left" in answer.trouble
    assert log.add(record(4)) == ""
    assert [r.why for r in AuditLog(path).read(0, 10).records] == [f"drill {n}" for n in (1, 2, 3, 4)]
    assert log.read(0, 10).trouble == ""


def test_every_request_for_a_change_is_in_it(tmp_path: Path) -> None:
    began = time.time()
    with live_agent(listen=None) as agent:
        agent.start("--allow-faults")
        fault = agent.inject(kind="noop", duration_s=30, reason="a  drill\nof\x00ours", params={})
        agent.post(f"/v1/faults/{fault['id']}/keepalive")
        agent.post(f"/v1/faults/{fault['id']}/revert")
        agent.post("/v1/faults", {"kind": "noop", "duration_s": 1e9})
        agent.post("/v1/faults", {"kind": "noop"}, role="viewer")
        agent.post("/v1/faults", {"kind": "noop"}, role="nobody")
        with agent.client("nobody") as client:
            client.post("/v1/faults/halt", content=b"\xff{", headers={"Authorization": "Bearer secret-of-a-guess"})
        agent.post("/v1/node/cordon", {"reason": "optic"}, role="operator")
        agent.post("/v1/node/uncordon", {"reason": "new optic"}, role="operator")
        agent.post("/v1/faults/halt", {"reason": "incident"}, role="operator")
        agent.post("/v1/faults/allow", {"reason": "over"}, role="operator")
        for verb in ("drain", "evict", "rejoin"):
            agent.post(f"/v1/job/replicas/r1/{verb}", {"reason": "firmware"}, role="operator")
        agent.kill()
        agent.start("--allow-faults")
        records = [AuditRecord.model_validate(r) for r in agent.get("/v1/audit", role="viewer").json()["records"]]
        assert [(r.who, r.action, r.target, r.result) for r in records] == [
            ("the-chaos", "inject", "", "ok"),
            ("the-chaos", "revert", fault["id"], "ok"),
            ("the-chaos", "inject", "", "bad-duration"),
            ("the-viewer", "inject", "", "forbidden"),
            ("", "inject", "", "unauthorized"),
            ("", "halt", "", "unauthorized"),
            ("the-operator", "cordon", "", "ok"),
            ("the-operator", "uncordon", "", "ok"),
            ("the-operator", "halt", "", "ok"),
            ("the-operator", "allow", "", "ok"),
            *(("the-operator", verb, "r1", "no-coordinator") for verb in ("drain", "evict", "rejoin")),
        ]
        first = records[0]
        assert (first.asks["kind"], first.asks["duration_s"], first.source) == ("noop", 30, "unix socket")
        assert fault["id"] in first.detail
        assert began <= first.time <= time.time()
        assert "too long" in records[2].detail
        assert agent.get(f"/v1/audit?since={time.time() + 60}").json()["records"] == []
        text = (agent.state / "audit.jsonl").read_text()
        assert len(text.splitlines()) == len(records)
        assert not any(secret in text for secret in (*TOKENS.values(), "secret-of-a-guess"))


def test_half_a_character_in_a_request_is_in_the_way_of_no_later_record(tmp_path: Path) -> None:
    """A refused request is kept as it came, and JSON can spell what no file can hold."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    assert log.add(record(1, why="a \ud800 b", asks={"kind\udfff": "\ud801"})) == ""
    assert log.add(record(2)) == ""
    assert [r.why for r in AuditLog(path).read(0, 10).records] == ["a ? b", "drill 2"]
    assert AuditLog(None).add(record(3, why="\ud800")) == ""
