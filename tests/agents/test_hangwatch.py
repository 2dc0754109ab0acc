"""The agent's part in a hang: it looks at the processes of its node, and ends one that does not wake up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agents.api.evidence import RankStacks
from agents.recovery.hangwatch import KEPT, HangWatch
from ftar_core.wire.messages import HangView, OpReply


class Cluster:
    """Everything around the watch, by hand."""

    def __init__(self, tmp_path: Path) -> None:
        self.name = "node1"
        self.hangs: tuple[HangView, ...] = ()
        self.asked: list[tuple[str, str]] = []
        self.restarted: list[str] = []
        self.events: list[tuple[str, str, str]] = []
        self.step, self.silent_s = 7, 0.0
        self.supervisor: Any = self
        self.watch = HangWatch(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            directory=tmp_path / "evidence",
            grace_s=5.0,
            emit=lambda *event: self.events.append(event),
        )

    def ranks(self) -> list[Any]:
        return [SimpleNamespace(replica="r1", rank=0, step=self.step, silent_s=self.silent_s)]

    def of_replica(self, replica: str) -> list[RankStacks]:
        return [
            RankStacks(replica=replica, rank=n, node="node1", pid=n, time=0.0, state="S", summary=f"waiting {n}")
            for n in (0, 1)
        ]

    def request(self, principal: str, op: str, *, replica: str = "", reason: str = "") -> OpReply:
        self.asked.append((op, reason))
        return OpReply(id=1, code="ok", text="", hangs=self.hangs)

    def supervises(self, replica: str) -> bool:
        return replica == "r1"

    def restart_replica(self, replica: str, why: str) -> None:
        self.restarted.append(f"{replica}: {why}")


def hang(**changes: Any) -> HangView:
    return HangView(**{"replica": "r1", "incarnation": 3, "rank": 1, "wanted": True, "evicted": False, **changes})


def test_a_coordinator_whose_ranks_get_on_is_not_asked(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for second in range(10):
        cluster.step += 1
        cluster.watch._look(float(second))
    assert not cluster.asked


def test_evidence_of_the_named_rank_comes_first_and_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.hangs = (hang(),)
    for second in range(4):
        cluster.watch._look(float(second))
    sent = [text for op, text in cluster.asked if op == "evidence"]
    assert len(sent) == 1
    assert sent[0].splitlines()[0] == "rank 1 (pid 1 on node1) is waiting 1"
    (kept,) = (tmp_path / "evidence").iterdir()
    assert kept.read_text() == sent[0]
    assert [event[:2] for event in cluster.events] == [("replica.stacks", "r1")]


def test_a_rank_of_another_node_is_left_to_that_node(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.hangs = (hang(rank=5),)
    for second in range(4):
        cluster.watch._look(float(second))
    assert not [op for op, _ in cluster.asked if op == "evidence"]


def test_who_does_not_wake_up_within_the_grace_period_is_started_again_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.hangs = (hang(wanted=False, evicted=True),)
    for second in range(20):
        cluster.watch._look(float(second))
    assert cluster.restarted == ["r1: evicted as hung, and it did not wake up within 5 s"]


def test_who_wakes_up_is_left_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.hangs = (hang(wanted=False, evicted=True),)
    for second in range(5):
        cluster.watch._look(float(second))
    cluster.hangs = ()
    for second in range(5, 20):
        cluster.watch._look(float(second))
    assert not cluster.restarted


def test_old_evidence_makes_room(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    (tmp_path / "evidence").mkdir()
    for number in range(KEPT + 5):
        (tmp_path / "evidence" / f"r9-{number:02}.txt").write_text("old")
    cluster.watch._keep("r1", "new")
    assert len(list((tmp_path / "evidence").iterdir())) == KEPT
