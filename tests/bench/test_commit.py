"""`bench commit`: thousands of ranks are the user's; a few dozen show that it measures what it says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftar_core.bench import commit, limits
from ftar_core.bench.report import BenchError, UsageError

from .runs import rows_of


def test_a_step_is_committed_a_replica_is_lost_and_comes_back_in_jobs_of_both_kinds() -> None:
    teams, solos = rows_of("commit", "--shape", "3x5,6x1", "--steps", "5", "--period-ms", "100")
    assert [(row["shape"], row["ranks"], row["commits"]) for row in (teams, solos)] == [("3x5", 15, 5), ("6x1", 6, 5)]
    for row in (teams, solos):
        assert 0 < row["commit_ms_p50"] <= row["commit_ms_p99"] <= row["commit_ms_max"]
        assert row["commit_ms_p50"] <= row["seen_ms_p50"]
        assert row["epoch_ms"] > 0
        assert row["join_ms"] > 0
        assert row["coordinator_mib"] > 1
    assert teams["leader_mib"] > 1
    assert (teams["way"], teams["unix_sockets"]) == ("unix", 12), "all but the leaders, as ranks on their leader's node"
    assert (solos["way"], solos["unix_sockets"]) == ("tcp", 0), "a member's leader is the coordinator"
    assert solos["leader_cpu_ms"] is None


def test_ranks_can_be_connected_as_if_they_were_on_other_nodes() -> None:
    (row,) = rows_of("commit", "--shape", "2x3", "--steps", "2", "--period-ms", "100", "--ranks", "tcp")
    assert (row["way"], row["unix_sockets"]) == ("tcp", 0)
    assert 0 < row["commit_ms_p50"] <= row["seen_ms_p50"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("16", "replicas x ranks"),
        ("0x4", "1 to 2048 replicas"),
        ("4096x1", "1 to 2048 replicas"),
        ("256x640", "at most 65536 ranks"),
    ],
)
def test_shapes_that_cannot_be_are_named(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        commit.parse_shapes(text)


def test_too_few_file_descriptors_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _kind: (1024, 4096))
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(limits.resource, "setrlimit", lambda _kind, limits: changed.append(limits))
    with pytest.raises(BenchError, match="10496 file descriptors a process are needed, the hard limit is 4096"):
        limits.raise_descriptors(10240)
    assert changed == []
    limits.raise_descriptors(2000)
    assert changed == [(2256, 4096)]
    limits.raise_descriptors(500)
    assert len(changed) == 1, "enough already"


def test_nothing_is_left_when_it_is_killed() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "ftar_core.bench", "commit", "--shape", "2x3", "--steps", "1000", "--period-ms", "100"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    deadline = time.monotonic() + 60
    while len(pids := children.read_text().split()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait()
    while any(_lives(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
