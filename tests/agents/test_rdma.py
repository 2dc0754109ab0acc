"""RDMA ports from trees as /sys has them: states, counters, peers, and what a restarted agent still sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.api.words import Health
from agents.health.signals import Observed
from agents.host.sysfs import Sysfs
from agents.monitors.rdma import RULES, RdmaMonitor, Rule


class Tree:
    """Four ConnectX-7 of a DGX, as far as their ports go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.saved = root / "rdma.json"
        self.now, self.wall = 1000.0, 1_700_000_000.0
        for number in range(4):
            self.port(number)
        self.monitor = self.fresh()

    def fresh(self) -> RdmaMonitor:
        return RdmaMonitor(Sysfs(self.root / "sys"), self.saved)

    def port(self, number: int) -> None:
        device = f"class/infiniband/mlx5_{number}"
        self.write(f"{device}/device/current_link_width", "16")
        for name, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", "400 Gb/sec (4X NDR)")):
            self.write(f"{device}/ports/1/{name}", text)
        for rule in RULES:
            self.count(number, rule.counter, 7)

    def write(self, path: str, text: str) -> None:
        file = self.root / "sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def set(self, number: int, name: str, text: str) -> None:
        self.write(f"class/infiniband/mlx5_{number}/ports/1/{name}", text)

    def count(self, number: int, counter: str, value: int) -> None:
        hardware = counter in ("rnr_nak_retry_err", "roce_slow_restart", "local_ack_timeout_err")
        self.set(number, f"{'hw_counters' if hardware else 'counters'}/{counter}", str(value))

    def look(self, after_s: float = 1.0) -> dict[str, Observed]:
        self.now += after_s
        self.wall += after_s
        return {one.object: one for one in self.monitor.read(self.now, self.wall)}

    def of(self, number: int, after_s: float = 1.0) -> tuple[str, str]:
        one = self.look(after_s)[f"rdma mlx5_{number}/1"]
        return one.health.value, one.signals[0].code if one.signals else ""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_ports_that_are_well(tree: Tree) -> None:
    seen = tree.look()
    assert len(seen) == 4
    assert {(one.health, one.reason) for one in seen.values()} == {(Health.HEALTHY, "up, 400 Gb/sec (4X NDR)")}


def test_a_port_that_goes_down_is_a_fault_and_one_that_was_never_up_is_not(tree: Tree) -> None:
    tree.set(3, "state", "1: DOWN")
    tree.set(3, "phys_state", "3: Disabled")
    assert tree.of(3) == ("unknown", "")
    tree.set(0, "state", "1: DOWN")
    tree.set(0, "phys_state", "2: Polling")
    one = tree.look()["rdma mlx5_0/1"]
    assert (one.signals[0].code, "2: Polling" in one.reason) == ("rdma.down", True)
    tree.set(0, "state", "4: ACTIVE")
    tree.set(0, "phys_state", "5: LinkUp")
    assert tree.of(0) == ("healthy", "")


def test_a_device_is_gone_after_three_looks(tree: Tree) -> None:
    tree.look()
    (tree.root / "sys/class/infiniband/mlx5_1").rename(tree.root / "unplugged")
    assert [tree.of(1)[0] for _look in range(3)] == ["unknown", "unknown", "unhealthy"]
    (tree.root / "unplugged").rename(tree.root / "sys/class/infiniband/mlx5_1")
    assert tree.of(1) == ("healthy", "")


@pytest.mark.parametrize("rule", RULES, ids=[f"{rule.counter}-{rule.health.value}" for rule in RULES])
def test_counters(tree: Tree, rule: Rule) -> None:
    tree.look()
    span_s = 10 if rule.per_s else 600 if rule.window_s > 60 else 10
    allowed = int(rule.over * span_s) if rule.per_s else int(rule.over)
    if not rule.per_s and rule.window_s > 60:  # slowly, over the hour
        for step in range(10):
            tree.look(59.0)
            tree.count(2, rule.counter, 7 + allowed * (step + 1) // 10)
    else:
        tree.count(2, rule.counter, 7 + min(allowed, 100_000))
    assert tree.of(2, span_s) == ("healthy", "")
    tree.count(2, rule.counter, 7 + allowed + 20)
    assert tree.of(2, 0.0) == (rule.health.value, f"rdma.{rule.counter}")
    assert tree.of(1) == ("healthy", "")


def test_a_driver_that_counts_from_nothing_again_is_no_error(tree: Tree) -> None:
    tree.look()
    tree.count(0, "link_downed", 0)
    assert tree.of(0) == ("healthy", "")
    tree.count(0, "link_downed", 1)
    assert tree.of(0) == ("unhealthy", "rdma.link_downed")


def test_slower_or_narrower_than_its_peers(tree: Tree) -> None:
    tree.set(0, "rate", "200 Gb/sec (4X HDR)")
    assert tree.of(0) == ("degraded", "rdma.rate")
    tree.port(0)
    tree.write("class/infiniband/mlx5_2/device/current_link_width", "8")
    assert tree.of(2) == ("degraded", "rdma.width")
    assert tree.of(0) == ("healthy", "")


def test_what_happened_while_the_agent_was_away(tree: Tree) -> None:
    tree.look()
    tree.count(1, "link_downed", 8)
    tree.set(2, "state", "1: DOWN")
    tree.monitor = tree.fresh()
    assert tree.of(1, 300.0) == ("unhealthy", "rdma.link_downed")
    assert tree.of(2) == ("unhealthy", "rdma.down")
    tree.saved.write_text("{garbage")
    tree.monitor = tree.fresh()
    assert tree.of(1) == ("healthy", "")


def test_virtual_functions_and_garbage_are_left_out(tree: Tree) -> None:
    (tree.root / "sys/class/infiniband/mlx5_0/device/physfn").mkdir()
    tree.set(1, "counters/link_downed", "N/A (no PMA)")
    seen = tree.look()
    assert "rdma mlx5_0/1" not in seen
    assert seen["rdma mlx5_1/1"].health is Health.HEALTHY
