"""Replicas of several ranks: they start together, and what ends one ends all, so that they can start together again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from agents.api.models import ProcessView
from agents.recovery import whole
from agents.recovery.whole import ALONE_S, RankNow, judge, waits_for
from agents.settings import Supervised
from ftar_core.wire.exits import RankExit

from .conftest import Node, wait_for

RUNS, WANTS, BROKEN, FAILED = RankNow(runs=True), RankNow(wants_start=True), RankNow(broken=True), RankNow(failed=True)
RESTS = RankNow()


@pytest.mark.parametrize(
    ("ranks", "alone_s", "start", "end", "again"),
    [
        ((WANTS, WANTS), 0.0, True, (), True),
        ((WANTS, RESTS), 0.0, False, (), True),  # its process is being ended, or was just asked for
        ((WANTS, BROKEN), 0.0, False, (), True),  # waits for its back-off
        ((RUNS, RUNS), 0.0, False, (), True),
        ((RUNS, BROKEN), 0.1, False, (), True),  # it is about to end by itself
        ((RUNS, BROKEN), ALONE_S, False, (0,), True),
        ((RUNS, WANTS, RUNS), ALONE_S, False, (0, 2), True),
        ((RUNS, FAILED), ALONE_S, False, (0,), False),  # starting them again would not help
        ((WANTS, FAILED), ALONE_S, False, (), True),
        ((RUNS, RESTS), ALONE_S, False, (), True),  # that one finished, was drained or stopped: no reason to end
    ],
)
def test_what_the_ranks_mean_for_each_other(
    ranks: tuple[RankNow, ...], alone_s: float, start: bool, end: tuple[int, ...], again: bool
) -> None:
    verdict = judge(dict(enumerate(ranks)), alone_s)
    assert (verdict.start, verdict.end, verdict.again) == (start, end, again)


def test_a_replica_of_one_rank_waits_for_nobody() -> None:
    assert judge({0: WANTS}, 0.0).start
    assert not judge({0: BROKEN}, 9.0).end


def test_who_is_waited_for_is_named() -> None:
    assert waits_for({0: WANTS, 1: BROKEN, 2: WANTS}, 0) == "it starts together with rank 1"
    assert "rank 1 failed" in waits_for({0: WANTS, 1: FAILED}, 0)
    assert waits_for({0: WANTS, 1: WANTS}, 0) == ""


def of_two(node: Node, name: str, *args: str, second: tuple[str, ...] = ()) -> None:
    for rank, given in enumerate((args, second or args)):
        node.replicas.append(Supervised(replica=name, rank=rank, module="sample_replica", args=list(given)))


def views(node: Node, name: str) -> list[ProcessView]:
    assert node.supervisor is not None
    return sorted((v for v in node.supervisor.views() if v.replica == name), key=lambda v: v.rank)


def pids(node: Node, name: str) -> list[int]:
    """Of its ranks, once both run."""
    wait_for(lambda: all(v.state == "running" for v in views(node, name)), f"{name} runs")
    found = [v.pid for v in views(node, name)]
    assert all(pid is not None for pid in found)
    return [pid for pid in found if pid is not None]


def test_ranks_are_told_what_torchrun_would_tell_them(node: Node, tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        of_two(node, name, "facts", str(tmp_path / f"{name}.0"), second=("facts", str(tmp_path / f"{name}.1")))
    node.start()
    told = {}
    for name in ("r1", "r2"):
        for rank in (0, 1):
            path = tmp_path / f"{name}.{rank}"
            wait_for(path.exists, str(path))
            env = json.loads(path.read_text(encoding="utf-8"))["env"]
            assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
            assert env["MASTER_ADDR"] == "127.0.0.1"
            told[name, rank] = env["MASTER_PORT"]
    assert told["r1", 0] == told["r1", 1] != told["r2", 0] == told["r2", 1]


def test_a_killed_rank_ends_its_replica_and_only_that_and_both_ranks_start_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "ALONE_S", 0.2)
    of_two(node, "r1", "sleep")
    of_two(node, "r2", "sleep")
    node.start()
    first, others = pids(node, "r1"), pids(node, "r2")
    os.kill(first[1], signal.SIGKILL)
    wait_for(lambda: all(v.restarts == 1 for v in views(node, "r1")), "both ranks to start again")
    assert not set(pids(node, "r1")) & set(first)
    assert pids(node, "r2") == others
    said = [(kind, thing) for kind, thing, _ in node.events if thing in ("r1", "r1/1")]
    last_end = max(n for n, event in enumerate(said) if event[0] == "replica.exited")
    starts = [n for n, event in enumerate(said) if event[0] == "replica.started"]
    assert len(starts) == 4
    assert starts[2] > last_end, "no rank starts before all of the earlier life are gone"
    assert "rank 1 of the replica ended" in " ".join(node.said("replica.exited", "r1"))


def test_a_rank_that_cannot_be_helped_stops_the_others_and_a_start_is_for_all(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "ALONE_S", 0.2)
    code = tmp_path / "code"
    code.write_text(str(int(RankExit.USAGE)), encoding="ascii")
    of_two(node, "r1", "sleep", second=("exit-from-file", str(code)))
    supervisor = node.start()
    wait_for(lambda: [v.state for v in views(node, "r1")] == ["stopped", "failed"], "rank 0 to be stopped")
    assert "rank 1 of the replica failed" in views(node, "r1")[0].reason
    code.write_text("sleep", encoding="ascii")
    supervisor.start_replica("r1")
    pids(node, "r1")


def test_a_drained_replica_rests_whole_and_rejoins_whole(node: Node, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.write_text(str(int(RankExit.DRAINED)), encoding="ascii")
    of_two(node, "r1", "exit-from-file", str(code))
    supervisor = node.start()
    wait_for(lambda: [v.state for v in views(node, "r1")] == ["stopped", "stopped"], "both to rest")
    code.write_text("sleep", encoding="ascii")
    supervisor.rejoin("r1")
    pids(node, "r1")
