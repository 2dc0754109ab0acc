"""`ftctl dump replica R`: what its processes are doing."""

from __future__ import annotations

from typing import Any

import pytest

from agents.api.evidence import RankStacks, ThreadView

from .conftest import Run
from .fake_agent import FakeCluster


def rank(number: int, node: str, **change: Any) -> RankStacks:
    base: dict[str, Any] = {
        "replica": "r1",
        "rank": number,
        "node": node,
        "pid": 4000 + number,
        "time": 0.0,
        "state": "S",
        "summary": "waiting, its main thread at train.py:44 in happen",
        "python": 'Thread 0x1 (most recent call first):\n  File "/x/train.py", line 44 in happen',
        "threads": [ThreadView(tid=4000, name="python", state="S", wchan="futex_wait", syscall="202 0x0")],
    }
    return RankStacks(**{**base, **change})


@pytest.fixture
def team(cluster: FakeCluster) -> FakeCluster:
    """Replica r1 with two ranks on node1."""
    cluster["node1"].stacks = [rank(0, "node1"), rank(1, "node1", summary="stopped by a signal (state T)", python="")]
    return cluster


def test_a_sentence_a_rank_and_its_stacks(ftctl: Run, team: FakeCluster) -> None:
    result = ftctl("dump", "replica", "r1", "--stacks")
    assert result.code == 0, result.err
    assert "r1.0  pid 4000 on node1: waiting, its main thread at train.py:44 in happen" in result.out
    assert "line 44 in happen" in result.out
    assert "futex_wait" in result.out
    assert "r1.1  pid 4001 on node1: stopped by a signal (state T)" in result.out


def test_one_rank_without_its_stacks_as_json(ftctl: Run, team: FakeCluster) -> None:
    whole = ftctl("dump", "replica", "main/r1", "--rank", "1", "--no-stacks", "-o", "json").json()
    assert whole["schema"] == 1
    (one,) = whole["ranks"]
    assert (one["rank"], one["summary"]) == (1, "stopped by a signal (state T)")
    assert "python" not in one


def test_what_is_not_there_is_one_line(ftctl: Run, team: FakeCluster) -> None:
    result = ftctl("dump", "replica", "r1", "--rank", "9")
    assert result.code != 0
    assert "no process of it on node1" in result.err
    assert ftctl("dump", "replica", "r7").code == 2


def test_an_agent_that_does_not_answer_is_exit_code_6(ftctl: Run, team: FakeCluster) -> None:
    team["node1"].mode = "close-posts"
    assert ftctl("dump", "replica", "r1").code == 6
