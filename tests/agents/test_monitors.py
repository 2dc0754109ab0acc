"""Verdicts with their reasons, from readings alone; and a GPU library that hangs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_links import FakeLinks, address
from live_agent import until

from agents.api.models import FaultView, ProcessView
from agents.api.words import FaultState, Health
from agents.host.links import Counters, Nic
from agents.monitors import problems
from agents.monitors.gpujudge import judge as judge_gpu
from agents.monitors.gpus import GpuMonitor
from agents.monitors.nics import NicLimits, NicMonitor, NicReading, judge
from agents.monitors.nvml_child import GpuReading, read_all

UP = Nic("rail0", 2, "02:00:00:00:00:02", 1500, up=True, carrier=True)
DOWN = msgspec.structs.replace(UP, up=False, carrier=False)
DEAD = msgspec.structs.replace(UP, carrier=False)
LIMITS = NicLimits()


@pytest.mark.parametrize(
    ("reading", "health", "words", "action"),
    [
        (NicReading("rail0", "rail", UP), Health.HEALTHY, "up", ""),
        (NicReading("rail0", "rail", None), Health.UNHEALTHY, "no such device", "driver"),
        (NicReading("rail0", "rail", DOWN), Health.UNHEALTHY, "administratively", "ip link set rail0 up"),
        (NicReading("rail0", "rail", DEAD), Health.UNHEALTHY, "no carrier", "switch port"),
        (NicReading("rail0", "rail", DOWN, fault="f-1"), Health.UNHEALTHY, "fault f-1 (injected)", "ftctl revert f-1"),
        (NicReading("rail0", "rail", UP, fault="f-1"), Health.HEALTHY, "up", ""),
        (NicReading("eth7", "other", DOWN), Health.UNKNOWN, "not in use", ""),
        (NicReading("mgmt0", "mgmt", DEAD), Health.UNHEALTHY, "no carrier", "cable"),
        (NicReading("rail0", "rail", UP, carrier_changes=2, span_s=60), Health.HEALTHY, "up", ""),
        (NicReading("rail0", "rail", UP, carrier_changes=3, span_s=60), Health.DEGRADED, "flapping", "cable"),
        (NicReading("rail0", "rail", UP, errors=600, span_s=60), Health.HEALTHY, "up", ""),
        (NicReading("rail0", "rail", UP, errors=660, span_s=60), Health.DEGRADED, "11 errors a second", "cable"),
    ],
)
def test_a_nics_verdict_has_its_reason(reading: NicReading, health: Health, words: str, action: str) -> None:
    verdict = judge(reading, LIMITS)
    assert verdict.health is health
    assert words in verdict.reason
    assert action in verdict.hint


def test_rails_come_first_and_a_missing_one_is_shown(links: FakeLinks) -> None:
    links.addrs[2] = [address("10.0.0.1/24")]
    monitor = NicMonitor(links, ("rail1", "rail0", "rail9"), "mgmt0")
    views = [view for view, _verdict in monitor.read(0.0, {})]
    assert [(v.name, v.role, v.present) for v in views] == [
        ("rail1", "rail", True),
        ("rail0", "rail", True),
        ("rail9", "rail", False),
        ("mgmt0", "mgmt", True),
    ]
    assert views[1].addresses == ["10.0.0.1/24"]
    assert views[2].state is Health.UNHEALTHY


def test_flapping_is_seen_within_its_window_and_forgotten_after_it(links: FakeLinks) -> None:
    monitor = NicMonitor(links, ("rail0",), None)

    def health(now: float, changes: int, fault: str = "") -> Health:
        links.change(2, counters=Counters(carrier_changes=changes))
        return monitor.read(now, {"rail0": fault} if fault else {})[0][0].state

    assert health(0, 10) is Health.HEALTHY
    assert health(10, 12) is Health.HEALTHY
    assert health(20, 14) is Health.DEGRADED
    assert health(90, 14) is Health.HEALTHY


def test_what_a_fault_of_ours_does_is_not_flapping(links: FakeLinks) -> None:
    monitor = NicMonitor(links, ("rail0",), None)
    changes = 0
    for number in range(4):
        links.change(2, counters=Counters(carrier_changes=changes))
        assert monitor.read(number * 10.0, {"rail0": "f-1"})[0][0].injected
        changes += 2
    links.change(2, counters=Counters(carrier_changes=changes))
    assert monitor.read(41.0, {})[0][0].state is Health.HEALTHY


def test_problems_name_the_thing_the_reason_and_the_next_command() -> None:
    fault = FaultView(
        id="f-1", kind="link-down", node="node1", target="node1/rail0", state=FaultState.STUCK, owner="ann",
        reason="", created=0, duration_s=1, ttl_left_s=0, detail="no", undo=["ip link set rail0 up"],
    )  # fmt: skip
    stuck = problems.of_faults([fault])[0]
    assert (stuck.object, "f-1 is stuck" in stuck.reason) == ("node1/rail0", True)
    assert "ftctl revert f-1" in stuck.action
    assert "ip link set rail0 up" in stuck.action
    failed = ProcessView(replica="r1", rank=0, pid=None, state="failed", log="/x/r1.log", reason="exit code 2")
    paused = ProcessView(replica="r2", rank=0, pid=77, state="running", status="stopped")
    well = ProcessView(replica="r3", rank=0, pid=78, state="running", status="sleeping")
    found = problems.of_processes([failed, paused, well])
    assert [(p.object, p.action) for p in found] == [
        ("r1/rank0", "see /x/r1.log, then: ftctl rejoin replica r1"),
        ("r2/rank0", "kill -CONT 77"),
    ]


# --- GPUs ---------------------------------------------------------------------------------------------------------


@contextmanager
def monitored(code: str, deadline_s: float = 1.0) -> Iterator[GpuMonitor]:
    command: Sequence[str] = (sys.executable, "-c", code)
    monitor = GpuMonitor(deadline_s, command, poll_s=0.05)
    monitor.start()
    try:
        yield monitor
    finally:
        monitor.close()


ONE_GPU = '{"gpus": [{"index": 0, "uuid": "GPU-1", "name": "X", "temperature_c": 40}]}'


def test_a_machine_without_the_library_says_so() -> None:
    monitor = GpuMonitor(20.0)
    monitor.start()
    try:
        until(lambda: monitor.summary().note != "not read yet", "an answer")
        summary = monitor.summary()
        assert summary.devices or summary.note.startswith("no GPUs (")
    finally:
        monitor.close()


def test_a_library_that_hangs_costs_the_fresh_reading_and_nothing_else(tmp_path: Path) -> None:
    code = f"""import os, time
while not os.path.exists({str(tmp_path / "hang")!r}):
    print('{ONE_GPU}', flush=True)
    input()
time.sleep(600)"""
    with monitored(code, deadline_s=30.0) as monitor:  # it takes a busy machine a while to start the child
        until(lambda: bool(monitor.summary().devices), "the first reading")
        child = monitor._child
        monitor._deadline_s = 0.5
        (tmp_path / "hang").touch()
        until(lambda: "did not answer" in monitor.summary().note, "the hang is noticed")
        summary = monitor.summary()
        assert [gpu.uuid for gpu in summary.devices] == ["GPU-1"]
        assert summary.state is Health.UNKNOWN
        assert child is not None
        until(lambda: child.poll() is not None, "the child that hangs is killed")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('not json', flush=True); input()", "nonsense"),
        ("import sys; sys.exit(3)", "its process ended"),
        ("import sys; sys.stdout.write('x' * 3000000); sys.stdout.flush(); input()", "nonsense"),
    ],
)
def test_a_child_that_misbehaves_is_said_to(code: str, words: str) -> None:
    with monitored(code, deadline_s=20.0) as monitor:
        until(lambda: words in monitor.summary().note, words)


def test_a_final_answer_ends_the_child() -> None:
    code = """print('{"note": "no GPUs (NVML not found)", "final": true}', flush=True); input()"""
    with monitored(code, deadline_s=20.0) as monitor:
        until(lambda: monitor.summary().note == "no GPUs (NVML not found)", "the answer")
        until(lambda: monitor._child is None, "the child is gone")
        time.sleep(0)


class NvmlError(Exception):
    pass


def nvml(**broken: bool) -> Any:
    """A stand-in for pynvml with two GPUs; the second has fallen off the bus if `lost`."""

    def handle(index: int) -> int:
        if broken.get("lost") and index == 1:
            raise NvmlError("GPU is lost")
        return index

    def power(_handle: int) -> int:
        if broken.get("power"):
            raise NvmlError("Not Supported")
        return 250_000

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}",
        nvmlDeviceGetName=lambda h: b"NVIDIA X",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(used=2**30, total=2**31),
        nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=55),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda h, kind: 61,
    )


def test_readings_have_units() -> None:
    first = read_all(nvml()).gpus[0]
    assert first == GpuReading(0, "GPU-0", "NVIDIA X", 61.0, 55.0, 1024.0, 2048.0, 250.0)


def test_an_unsupported_reading_is_missing_and_a_lost_gpu_is_unhealthy() -> None:
    answer = read_all(nvml(power=True, lost=True))
    assert answer.gpus[0].power_w is None
    assert judge_gpu(answer.gpus[0])[0] is Health.HEALTHY
    assert judge_gpu(answer.gpus[1])[:2] == (Health.UNHEALTHY, "cannot be read: GPU is lost")
    hot = msgspec.structs.replace(answer.gpus[0], temperature_c=95.0)
    assert judge_gpu(hot)[0] is Health.DEGRADED
