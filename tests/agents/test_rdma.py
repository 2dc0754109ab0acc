"""RDMA ports from trees as /sys has them: states, counters, peers, and what a restarted agent still sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.api.words import Health
from agents.health.signals import Observed
from agents.host.sysfs import Sysfs
from agents.monitors.portlimits import CounterRule, FlapLimits, RdmaLimits
from agents.monitors.portmemory import PortMemory
from agents.monitors.rdma import RdmaMonitor

RULES = RdmaLimits().rules
TREES = Path(__file__).parent / "trees"


class Tree:
    """Four ConnectX-7 of a DGX, as far as their ports go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.saved = root / "rdma.json"
        self.now, self.wall = 1000.0, 1_700_000_000.0
        for number in range(4):
            self.port(number)
        self.limits = RdmaLimits()
        self.boot = "boot-1"
        self.monitor = self.fresh()

    def fresh(self) -> RdmaMonitor:
        return RdmaMonitor(Sysfs(self.root / "sys"), PortMemory(self.saved, self.boot), self.limits)

    def port(self, number: int) -> None:
        device = f"class/infiniband/mlx5_{number}"
        self.write(f"{device}/device/current_link_width", "16")
        for name, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", "400 Gb/sec (4X NDR)")):
            self.write(f"{device}/ports/1/{name}", text)
        for counter, _rule in RULES:
            self.count(number, counter, 7)

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


@pytest.mark.parametrize(("counter", "rule"), RULES, ids=[f"{name}-{rule.health.value}" for name, rule in RULES])
def test_counters(tree: Tree, counter: str, rule: CounterRule) -> None:
    tree.look()
    span_s = 10 if rule.per_s else 600 if rule.window_s > 60 else 10
    allowed = int(rule.over * span_s) if rule.per_s else int(rule.over)
    if not rule.per_s and rule.window_s > 60:  # slowly, over the hour
        for step in range(10):
            tree.look(59.0)
            tree.count(2, counter, 7 + allowed * (step + 1) // 10)
    else:
        tree.count(2, counter, 7 + min(allowed, 100_000))
    assert tree.of(2, span_s) == ("healthy", "")
    tree.count(2, counter, 7 + allowed + 20)
    assert tree.of(2, 0.0) == (rule.health.value, f"rdma.{counter}")
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


def test_another_boot_counts_from_nothing(tree: Tree) -> None:
    tree.look()
    tree.count(1, "link_downed", 8)
    tree.boot = "boot-2"
    tree.monitor = tree.fresh()
    assert tree.of(1, 300.0) == ("healthy", "")


def test_thresholds_are_settings(tree: Tree) -> None:
    rules = {"symbol_error": [], "port_rcv_errors": [CounterRule(over=0, health=Health.UNHEALTHY, window_s=10)]}
    tree.limits = RdmaLimits(counters=rules, expect_ports=4, expect_rate_gbit=400)
    tree.monitor = tree.fresh()
    tree.look()
    tree.count(0, "symbol_error", 100_000)
    tree.count(1, "port_rcv_errors", 8)
    assert tree.of(0) == ("healthy", "")
    assert tree.of(1, 0.0) == ("unhealthy", "rdma.port_rcv_errors")
    assert tree.of(1, 11.0) == ("healthy", "")
    for number in range(4):  # all alike, and all slower than they should be
        tree.set(number, "rate", "200 Gb/sec (4X HDR)")
    assert tree.of(3) == ("degraded", "rdma.rate")
    tree.set(3, "state", "1: DOWN")
    seen = tree.look()["rdma ports"]
    assert (seen.health, seen.reason) == (Health.UNHEALTHY, "3 are up, 4 are expected")
    with pytest.raises(ValueError, match="there is no counter 'symbol_errors'"):
        RdmaLimits.model_validate({"counters": {"symbol_errors": []}})


def test_a_port_that_flaps_counts_as_flapping_until_it_is_cleared(tree: Tree) -> None:
    tree.limits = RdmaLimits(counters={"link_downed": []}, flaps=FlapLimits(repair_times=64))
    tree.monitor = tree.fresh()
    tree.look()
    for number in range(3):
        tree.set(1, "phys_state", "2: Polling")
        assert tree.of(1, 600.0) == ("unhealthy", "rdma.down")
        tree.monitor = tree.fresh() if number == 1 else tree.monitor  # an agent that comes and goes remembers
        tree.set(1, "phys_state", "5: LinkUp")
        seen = tree.of(1, 26.0)
    assert seen == ("degraded", "rdma.flaps")
    assert tree.of(1, 80_000.0) == ("degraded", "rdma.flaps")
    tree.monitor = tree.fresh()
    assert tree.of(1) == ("degraded", "rdma.flaps")
    assert tree.monitor.clear("rdma", "rdma mlx5_1/1") == {"rdma.flaps"}
    assert tree.of(1) == ("healthy", "")


def test_a_port_that_is_gone_can_be_forgotten(tree: Tree) -> None:
    tree.look()
    (tree.root / "sys/class/infiniband/mlx5_1").rename(tree.root / "taken-out")
    assert [tree.of(1)[0] for _look in range(3)][-1] == "unhealthy"
    assert "rdma.gone" in tree.monitor.clear("rdma", "rdma mlx5_1/1")
    assert "rdma mlx5_1/1" not in tree.look()


def plant(name: str, root: Path) -> Path:
    """A tree of real shape, from its attributes one a line."""
    for line in (TREES / f"{name}.txt").read_text().splitlines():
        path, value = line.split("\t")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{value}\n")
    return root


def test_a_node_with_eight_compute_ports_two_for_storage_and_one_to_manage_it(tmp_path: Path) -> None:
    """The ports for storage are slower and one of them is not used: neither is a fault."""
    root = plant("dgx-h100", tmp_path / "sys")
    monitor = RdmaMonitor(Sysfs(root))

    def look(now: float) -> dict[str, tuple[str, str]]:
        found = monitor.read(now, now, ["eno1np0"])
        return {one.object[5:]: (one.health.value, one.signals[0].code if one.signals else "") for one in found}

    seen = look(1.0)
    assert len(seen) == 10
    assert seen.pop("mlx5_2/1") == ("unknown", "")
    assert set(seen.values()) == {("healthy", "")}
    (root / "class/infiniband/mlx5_4/ports/1/rate").write_text("200 Gb/sec (2X NDR)\n")
    (root / "class/infiniband/mlx5_5/device/current_link_width").write_text("8\n")
    (root / "class/infiniband/mlx5_1/ports/1/phys_state").write_text("3: Disabled\n")
    seen = look(2.0)
    bad = {name: code for name, (_health, code) in seen.items() if code}
    assert bad == {"mlx5_4/1": "rdma.rate", "mlx5_5/1": "rdma.width", "mlx5_1/1": "rdma.down"}


def test_the_only_port_of_its_kind_that_was_never_up(tmp_path: Path) -> None:
    root = plant("dgx-h100", tmp_path / "sys")
    (root / "class/infiniband/mlx5_6/ports/1/state").write_text("1: DOWN\n")
    monitor = RdmaMonitor(Sysfs(root))
    codes = [one.signals[0].code for one in monitor.read(1.0, 1.0) if one.signals]
    assert codes == ["rdma.unused"]
    (root / "class/infiniband/mlx5_9/ports/1/state").write_text("1: DOWN\n")  # two may be meant so
    assert [one for one in RdmaMonitor(Sysfs(root)).read(1.0, 1.0) if one.signals] == []
