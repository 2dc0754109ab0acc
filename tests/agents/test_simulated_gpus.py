"""The GPU monitor over the real binding and a library that reads its GPUs from a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_agent import until

from agents.api.words import Health
from agents.host.simgpus import PROFILES, SimulatedGpus, SimulationProblem
from agents.monitors.gpus import GpuMonitor
from agents.monitors.nvml_child import XidSeen


@contextmanager
def watched(
    gpus: SimulatedGpus, deadline_s: float = 30.0, on_xid: Callable[[XidSeen], None] = lambda xid: None
) -> Iterator[GpuMonitor]:
    monitor = GpuMonitor(
        deadline_s, poll_s=0.05, expect=gpus.count() or 8, environment=gpus.environment(), on_xid=on_xid
    )
    monitor.start()
    try:
        until(lambda: monitor.summary().note != "not read yet", "an answer")
        yield monitor
    finally:
        monitor.close()


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_nodes_gpus_look_like_their_model(tmp_path: Path, profile: str) -> None:
    with watched(SimulatedGpus.create(tmp_path, "node0", 8, profile)) as monitor:
        summary = monitor.summary()
    assert (summary.state, summary.note, summary.simulated) == (Health.HEALTHY, "", True)
    assert len({gpu.uuid for gpu in summary.devices}) == 8
    for gpu in summary.devices:
        assert (gpu.name, gpu.simulated, gpu.memory_total_mb) == (
            PROFILES[profile].name,
            True,
            PROFILES[profile].memory_mb,
        )
        assert gpu.readings["nvlinks_up"] == 18
        assert gpu.readings["pcie_width"] == 16
        assert gpu.readings["recovery_action"] == 0


def test_a_lost_gpu_does_not_hide_the_others_and_each_fault_has_its_words(tmp_path: Path) -> None:
    gpus = SimulatedGpus.create(tmp_path, "node0", 8)
    with watched(gpus) as monitor:
        uuids = [gpu.uuid for gpu in monitor.summary().devices]
        old = [
            gpus.set_lost(3),
            gpus.set_ecc(0, uncorrected=2),
            gpus.set_row_remap(1, failure=True),
            gpus.set_throttle(2, clock_mhz=600),
            gpus.set_temperature(4, 93),
            gpus.set_nvlink_error(5, 7, errors=9, up=False),
            gpus.set_recovery_action(6, 2),
        ]
        expected = {
            0: (Health.DEGRADED, "2 uncorrected memory errors"),
            1: (Health.UNHEALTHY, "could not be remapped"),
            2: (Health.DEGRADED, "slowed down at 600 MHz: hardware thermal"),
            3: (Health.UNHEALTHY, "GPU is lost"),
            4: (Health.DEGRADED, "93 degrees C"),
            5: (Health.UNHEALTHY, "1 of 18 NVLinks are down"),
            6: (Health.UNHEALTHY, "reboot the node"),
            7: (Health.HEALTHY, "answers"),
        }
        until(
            lambda: [gpu.state for gpu in monitor.summary().devices] == [health for health, _ in expected.values()],
            "a reading that was begun after the last fault",
            60,
        )
        summary = monitor.summary()
        for index, (health, words) in expected.items():
            assert summary.devices[index].state is health
            assert words in summary.devices[index].reason
        assert [gpu.uuid for gpu in summary.devices] == uuids
        assert summary.note == "8 GPUs expected, 7 answer"
        for values in reversed(old):
            gpus.restore(values)
        until(lambda: monitor.summary().state is Health.HEALTHY, "all is well again")


def test_an_xid_is_told_by_itself(tmp_path: Path) -> None:
    gpus = SimulatedGpus.create(tmp_path, "node0", 8)
    seen: list[XidSeen] = []
    with watched(gpus, on_xid=seen.append) as monitor:
        raised = time.time()
        gpus.raise_xid(5, 79)
        gpus.set_lost(5)  # as it goes with this one
        until(lambda: bool(seen), "the event")
        assert (seen[0].index, seen[0].code, seen[0].simulated) == (5, 79, True)
        assert seen[0].uuid == monitor.summary().devices[5].uuid
        assert raised <= seen[0].time
        gpus.raise_xid(2, 31)
        until(lambda: len(seen) == 2, "the next")
        assert (seen[1].index, seen[1].code) == (2, 31)


def test_what_an_old_driver_has_not_got_is_absent(tmp_path: Path) -> None:
    missing = ["nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetPowerUsage", "nvmlEventSetCreate"]
    with watched(SimulatedGpus.create(tmp_path, "node0", 2, missing=missing)) as monitor:
        gpu = monitor.summary().devices[1]
    assert gpu.state is Health.HEALTHY
    assert gpu.power_w is None
    assert not {"recovery_action", "remap_pending"} & set(gpu.readings)
    assert gpu.readings["ecc_corrected"] == 0


def test_a_call_that_hangs_is_a_verdict_and_slow_ones_are_not(tmp_path: Path) -> None:
    gpus = SimulatedGpus.create(tmp_path, "node0", 2)
    with watched(gpus) as monitor:
        slow = gpus.hang("nvmlDeviceGetCount_v2", 0.1)
        time.sleep(0.3)
        assert monitor.summary().state is Health.HEALTHY
        gpus.restore(slow)
        monitor._deadline_s = 1.0
        gpus.hang("nvmlDeviceGetTemperature", 600)
        until(lambda: "GPU probe hangs" in monitor.summary().note, "the verdict")
        assert monitor.summary().state is Health.UNKNOWN
        driver = monitor.observed({-1: "f-1"})[-1]
        assert (driver.object, driver.health) == ("gpu driver", Health.UNKNOWN)
        assert [(s.code, s.fault, s.injected) for s in driver.signals] == [("gpu.probe", "f-1", True)]
        assert "GPU probe hangs" in driver.reason
        assert len(monitor.summary().devices) == 2


def test_a_driver_that_is_not_loaded(tmp_path: Path) -> None:
    gpus = SimulatedGpus.create(tmp_path, "node0", 8)
    gpus.set_driver(loaded=False)
    with watched(gpus) as monitor:
        summary = monitor.summary()
    assert summary.note == "8 GPUs expected, 0 answer; no GPUs (Driver Not Loaded)"
    assert (summary.state, summary.devices) == (Health.UNHEALTHY, [])


def test_what_cannot_be_simulated_is_said(tmp_path: Path) -> None:
    with pytest.raises(SimulationProblem, match="b300: no such GPU profile"):
        SimulatedGpus.create(tmp_path, "node0", 8, "b300")
    with pytest.raises(SimulationProblem, match="no such function"):
        SimulatedGpus.create(tmp_path, "node0", 8, missing=["nvmlFly"])
    gpus = SimulatedGpus.create(tmp_path, "node0", 8)
    with pytest.raises(SimulationProblem, match="GPU 8: there are 8"):
        gpus.set_lost(8)
    with pytest.raises(SimulationProblem, match="no state of simulated GPUs"):
        SimulatedGpus(tmp_path / "nowhere" / "state").set_lost(0)
