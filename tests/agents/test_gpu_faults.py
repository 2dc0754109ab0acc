"""Faults of GPUs: on simulated ones, on real ones, where there are none, and by a watchdog that has none."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
from fake_links import FakeClock
from live_agent import until

from agents.api.gpufaults import THROTTLE_REASONS
from agents.api.words import FaultState
from agents.faults.catalog import CATALOG
from agents.health.desk import HealthDesk
from agents.health.xidtable import read as read_table
from agents.host.gpus import NodeGpus, NoGpus, Seen, users_of
from agents.host.kmsg import KernelLine
from agents.host.machine import Machine
from agents.host.simgpus import THROTTLE, SimulatedGpus
from agents.host.workers import Worker
from agents.injection.guard import Limits
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Ledger
from agents.injection.problems import FaultProblem
from agents.injection.watchdog import Watchdog
from agents.monitors.kernellog import KernelLog
from agents.monitors.nvml_child import XidSeen
from agents.monitors.xids import XidDesk

LIMITS = Limits("node1", (), None, max_faults=8, max_duration_s=900)


@dataclasses.dataclass
class Node:
    machine: Machine
    ledger: Ledger

    def __post_init__(self) -> None:
        self.injector = Injector(self.ledger, self.machine, LIMITS, lambda *_: None)
        self.injector.start()

    def inject(self, kind: str, **params: int | str | bool | float) -> str:
        return self.injector.inject(Injection(kind=kind, owner="ann", duration_s=30, params=params)).id

    def refused(self, kind: str, **params: int | str | bool | float) -> str:
        with pytest.raises(FaultProblem) as caught:
            self.inject(kind, **params)
        return str(caught.value)


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus.create(tmp_path / "gpus", "node1", 2)


@pytest.fixture
def node(machine: Machine, gpus: SimulatedGpus, ledger_directory: Path) -> Node:
    simulated = NodeGpus(Seen, lambda gpu, code: None, gpus)
    return Node(dataclasses.replace(machine, gpus=simulated), Ledger(ledger_directory))


def test_the_reasons_to_throttle_are_those_that_can_be_simulated() -> None:
    assert set(THROTTLE_REASONS) == set(THROTTLE)


def test_a_fault_names_its_gpu_and_leaves_the_file_as_it_was(node: Node, gpus: SimulatedGpus) -> None:
    before = gpus.path.read_text()
    names = [
        node.inject("gpu-ecc", gpu=0, uncorrected=2),
        node.inject("gpu-throttle", gpu=1, cause="power brake"),
        node.inject("nvml-hang"),
    ]
    state = gpus.path.read_text()
    assert "gpu.0.ecc_uncorrected=2\n" in state
    assert "gpu.1.throttle=128\n" in state
    assert "delay.nvmlDeviceGetTemperature=86400" in state
    assert {str(e.target) for e in node.injector.entries()} == {"node1/gpu0", "node1/gpu1", "node1"}
    for name in names:
        node.injector.revert(name, "test")
    assert gpus.path.read_text() == before


def test_two_faults_on_one_gpu_would_put_back_each_others_values(node: Node) -> None:
    node.inject("gpu-lost", gpu=1)
    assert "gpu-lost" in (why := node.refused("gpu-xid", xid=79, gpu=1))
    assert "is on GPU 1 already" in why
    node.inject("gpu-xid", xid=31, gpu=0)
    node.inject("nvml-hang")
    assert "is on the driver already" in node.refused("nvml-hang", call="nvmlDeviceGetCount_v2")


def test_what_somebody_else_changed_meanwhile_stays(node: Node, gpus: SimulatedGpus) -> None:
    name = node.inject("gpu-throttle", gpu=0)
    gpus.change({"gpu.0.clock_sm": 900})
    node.injector.revert(name, "test")
    assert gpus.look(["gpu.0.clock_sm", "gpu.0.throttle"]) == {"gpu.0.clock_sm": "900", "gpu.0.throttle": "0"}
    gpus.set_lost(1)
    assert "is so already" in node.refused("gpu-lost", gpu=1)


def test_gpus_that_are_not_there(node: Node, machine: Machine, tmp_path: Path) -> None:
    for kind, params in (("gpu-lost", {}), ("gpu-xid", {"xid": 79}), ("gpu-hang", {})):
        why = node.refused(kind, gpu=2, **params)
        assert "node1 has no GPU 2" in why
    assert "GPU 1 has no NVLink" not in node.refused("nvlink-error", gpu=1, link=18)  # beyond what any has: a limit
    assert "no error at all" in node.refused("gpu-ecc", uncorrected=0)
    bare = NodeGpus(lambda: Seen(note="no GPUs (NVML not found)"), lambda gpu, code: None)
    without = Node(dataclasses.replace(machine, gpus=bare), Ledger(tmp_path / "other"))
    for kind in (kind for kind, fault in CATALOG.items() if fault.target == "gpu"):
        params = {"xid": 79} if kind == "gpu-xid" else {}
        with pytest.raises(FaultProblem, match=re.escape("no GPUs (NVML not found)")) as refused:
            without.inject(kind, **params)
        assert refused.value.hint.startswith("ftctl inject --list")


def test_real_gpus_take_an_xid_inside_the_agent_and_nothing_that_cannot_be_taken_back(
    machine: Machine, tmp_path: Path
) -> None:
    said: list[tuple[int, int]] = []
    real = NodeGpus(lambda: Seen(((0, ()), (3, ()))), lambda gpu, code: said.append((gpu, code)))
    node = Node(dataclasses.replace(machine, gpus=real), Ledger(tmp_path / "ledger"))
    name = node.inject("gpu-xid", xid=79, gpu=3)
    assert said == [(3, 79)]
    assert "has no GPU 1" in node.refused("gpu-xid", xid=79, gpu=1)
    assert node.injector.revert(name, "test").state is FaultState.REVERTED
    for kind in ("gpu-lost", "gpu-ecc", "gpu-row-remap", "nvlink-error", "nvml-hang"):
        assert "hardware" in node.refused(kind)


def test_the_watchdog_takes_them_back_by_their_record(node: Node, gpus: SimulatedGpus, clock: FakeClock) -> None:
    node.inject("gpu-lost", gpu=0)
    node.inject("gpu-xid", xid=79, gpu=1)
    assert gpus.look(["gpu.0.lost", "gpu.1.lost"]) == {"gpu.0.lost": "1", "gpu.1.lost": "1"}
    machine = dataclasses.replace(node.machine, gpus=NoGpus())
    clock.boot += 31
    assert Watchdog(node.ledger, machine).look(agent_lives=False) == 0
    after = gpus.look(["gpu.0.lost", "gpu.1.lost"])
    assert after == {"gpu.0.lost": None, "gpu.1.lost": None}


def test_whose_gpu_it_is() -> None:
    one, two = Worker("r1", 0, 11, 1), Worker("r1", 1, 12, 1)
    other = Worker("r2", 0, 13, 1)
    assert users_of([12, 99], [one, two, other]) == (two,)
    assert users_of([], [one, two]) == (one, two), "the only replica of the node"
    assert users_of([99], [one, other]) == (), "nobody knows which"


PYNVML = """
import os
FILE = os.environ["FAKE_POWER_LIMIT"]
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != "GPU-x": raise NVMLError("Not Found")
    return uuid
def nvmlDeviceGetPowerManagementLimitConstraints(gpu): return [200000, 700000]
def nvmlDeviceGetPowerManagementLimit(gpu): return int(open(FILE).read())
def nvmlDeviceSetPowerManagementLimit(gpu, mw):
    if os.environ.get("FAKE_DENIED"): raise NVMLError("Insufficient Permissions")
    open(FILE, "w").write(str(mw))
"""


def test_a_real_gpu_is_throttled_by_its_power_limit_which_is_put_back(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger_directory: Path
) -> None:
    limit = tmp_path / "limit"
    limit.write_text("650000")
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_POWER_LIMIT", str(limit))
    real = NodeGpus(lambda: Seen(((0, ()),), "", {0: "GPU-x"}), lambda gpu, code: None)
    node = Node(dataclasses.replace(machine, gpus=real), Ledger(ledger_directory))
    name = node.inject("gpu-throttle", power_percent=50)
    assert limit.read_text() == "325000"
    entry = node.injector.revert(name, "test")
    assert (limit.read_text(), entry.state) == ("650000", FaultState.REVERTED)
    name = node.inject("gpu-throttle", power_percent=10)
    assert limit.read_text() == "200000", "not below what it accepts"
    limit.write_text("500000")
    assert "which is not the fault's" in node.injector.revert(name, "test").detail
    assert limit.read_text() == "500000"
    limit.write_text("200000")
    assert "cannot be made slower" in node.refused("gpu-throttle")
    limit.write_text("500000")
    monkeypatch.setenv("FAKE_DENIED", "1")
    assert "Insufficient Permissions" in node.refused("gpu-throttle")


class RealNode(Node):
    """Two GPUs that are no simulated ones, their driver's log, and an agent that follows it. Between the file that
    stands for /dev/kmsg and the log that is followed, `kernel` does what the kernel does to what user space
    writes."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.device, self.log = folder / "kmsg", folder / "log"
        for file in (self.device, self.log):
            file.touch()
        self.desk = HealthDesk("node1", lambda *_args, **_more: None)
        xids = XidDesk(self.desk, read_table(), lambda gpu: next(iter(self.open_faults()), ""))
        slots = {0: "0000:04:00", 1: "0000:05:00"}
        gpus = NodeGpus(
            lambda: Seen(((0, ()), (1, ())), "", {0: "GPU-a", 1: "GPU-b"}, slots),
            lambda gpu, code: xids.seen(XidSeen(gpu, "GPU-b", code, 0.0, injected=True)),
        )
        places = {slot: (gpu, f"GPU-{gpu}") for gpu, slot in slots.items()}
        self.monitor = KernelLog(self.log, self.desk, xids, places.get)
        super().__init__(
            dataclasses.replace(machine, gpus=gpus, kernel_line=KernelLine(self.device)), Ledger(folder / "faults")
        )

    def open_faults(self) -> list[str]:
        return [entry.id for entry in self.injector.entries() if entry.open]

    def kernel(self) -> str:
        (line,) = self.device.read_text().splitlines()
        priority, _, text = line.removeprefix("<").partition(">")
        with self.log.open("a") as log:
            log.write(f"{int(priority)},4711,815,-;{text}\n")
        return line


def test_a_line_in_the_kernel_log_is_marked_and_is_heard_as_one_with_the_fault(
    machine: Machine, tmp_path: Path
) -> None:
    node = RealNode(machine, tmp_path)
    node.monitor.start()
    try:
        until(lambda: any(one.ok for one in node.desk.answer().monitors), "the log is followed")
        name = node.inject("gpu-xid", xid=79, gpu=1, kmsg=True, expect_remediation=True)
        line = "NVRM: Xid (PCI:0000:05:00): 79, name=ftctl, GPU has fallen off the bus."
        assert node.kernel() == f"<12>{line} (injected by ftctl fault {name})"
        until(lambda: len(node.desk.verdicts()[0].evidence) == 2, "the line is heard")
    finally:
        node.monitor.close()
    (verdict,) = node.desk.verdicts()
    assert (verdict.object, verdict.code, verdict.fault, verdict.count) == ("gpu 1", "xid.79", name, 1)
    assert verdict.injected
    assert "its line stays in the kernel log" in node.injector.revert(name, "test").detail
    node.desk.tick(node.open_faults())
    assert node.desk.verdicts() == [], "it counts as long as the fault, although the line stays"


def test_the_kernel_log_takes_two_words_a_right_and_real_gpus(machine: Machine, node: Node, tmp_path: Path) -> None:
    real = RealNode(machine, tmp_path)
    both = {"kmsg": True, "expect_remediation": True}
    assert "they may drain or reboot it" in real.refused("gpu-xid", xid=79, kmsg=True)
    assert "none would be written" in real.refused("gpu-xid", xid=79, expect_remediation=True)
    assert "GPUs are simulated" in node.refused("gpu-xid", xid=79, **both)
    blind = NodeGpus(lambda: Seen(((0, ()),)), lambda gpu, code: None)
    unplaced = Node(dataclasses.replace(real.machine, gpus=blind), Ledger(tmp_path / "unplaced"))
    assert "its PCI slot is not known" in unplaced.refused("gpu-xid", xid=79, **both)
    real.device.unlink()
    assert "there is no" in real.refused("gpu-xid", xid=79, **both)
    real.device.touch(0o444)
    if os.geteuid():
        assert "no right to write" in real.refused("gpu-xid", xid=79, **both)
    elsewhere = dataclasses.replace(real.machine, kernel_line=KernelLine())
    assert "may not write to the kernel log" in Node(elsewhere, Ledger(tmp_path / "more")).refused(
        "gpu-xid", xid=79, **both
    )
    assert real.device.read_bytes() == b""
    assert real.injector.entries() == []
