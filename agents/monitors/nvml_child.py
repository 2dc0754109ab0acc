"""The process that talks to NVML, because a driver in trouble can hang a caller for ever (nobody can kill a thread).

    python -m agents.monitors.nvml_child

Reads lines from standard input; each is answered by one line of JSON: {"gpus": [...], "note": "..."}. The first answer
comes by itself. Without the library, a driver or a GPU it says so and ends: there is nothing to watch then.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from agents.host.simgpus import ENVIRONMENT, THROTTLE

MAX_NVLINKS = 18  # of Hopper and Blackwell; fewer are there on older ones
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, driver 570 and later
RECOVERY_CHANGED = 154  # the Xid that says so
LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
XID_EVENTS = 0x8  # nvmlEventTypeXidCriticalError


class GpuReading(msgspec.Struct, frozen=True):
    """One GPU; None for what it does not tell. Memory in MiB, power in watts, temperature in degrees Celsius.

    `more`: further readings by name with the unit at the end; a name is absent where the GPU or its driver has no such
    reading. `pids`: the processes that compute on it, as numbered where NVML runs.
    """

    index: int
    uuid: str
    name: str
    temperature_c: float | None = None
    utilization_percent: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    power_w: float | None = None
    lost: str = ""  # why it cannot be read
    more: dict[str, float] = {}
    throttle: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    pci: str = ""  # "00000000:04:00.0"


class XidSeen(msgspec.Struct, frozen=True):
    """The driver reported an Xid. `time`: Unix seconds, when it was read. `injected`: only here. `recovery`: field 230
    at that time, for the Xid that says it changed."""

    index: int
    uuid: str
    code: int
    time: float
    simulated: bool = False
    injected: bool = False
    recovery: int | None = None


class GpuAnswer(msgspec.Struct, frozen=True):
    """The readings, or, where there are `xids`, only those: they come by themselves, between the answers."""

    gpus: tuple[GpuReading, ...] = ()
    note: str = ""
    final: bool = False  # this process ends: asking again makes no sense
    simulated: bool = False
    xids: tuple[XidSeen, ...] = ()


Names = dict[int, tuple[str, str]]  # index: UUID and name


def read_all(nvml: Any, known: Names | None = None) -> GpuAnswer:
    """`nvml` is the pynvml module (its functions have no types), initialised. `known`: what the GPUs were called while
    they answered; it is kept up to date."""
    names: Names = {} if known is None else known
    return GpuAnswer(tuple(_read_one(nvml, index, names) for index in range(nvml.nvmlDeviceGetCount())))


class _Gpu:
    """Asks one GPU. What it does not support is None; that it is lost is remembered, whichever call says it first."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle, self.lost = nvml, handle, ""

    def ask(self, function: str, *arguments: int) -> Any:
        call = getattr(self._nvml, f"nvmlDeviceGet{function}", None)
        if call is None or self.lost:
            return None
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in LOST:
                self.lost = str(error)
            return None


def _read_one(nvml: Any, index: int, names: Names) -> GpuReading:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuReading(index, *names.get(index, ("", "")), lost=str(error))
    names[index] = uuid, name
    gpu = _Gpu(nvml, handle)
    memory, use = gpu.ask("MemoryInfo"), gpu.ask("UtilizationRates")
    power_mw, temperature = gpu.ask("PowerUsage"), gpu.ask("Temperature", 0)
    more = {key: float(value) for key, value in _more(gpu) if value is not None}
    reasons = gpu.ask("CurrentClocksEventReasons") or 0
    processes = gpu.ask("ComputeRunningProcesses") or ()
    pci = gpu.ask("PciInfo")
    if gpu.lost:
        return GpuReading(index, uuid, name, lost=gpu.lost)
    return GpuReading(
        index=index,
        uuid=uuid,
        name=name,
        temperature_c=None if temperature is None else float(temperature),
        utilization_percent=None if use is None else float(use.gpu),
        memory_used_mb=None if memory is None else memory.used / 2**20,
        memory_total_mb=None if memory is None else memory.total / 2**20,
        power_w=None if power_mw is None else power_mw / 1000,
        more=more,
        throttle=tuple(word for word, bit in THROTTLE.items() if reasons & bit),
        pids=tuple(process.pid for process in processes),
        pci=_text(pci.busId) if pci is not None else "",
    )


def _more(gpu: _Gpu) -> Iterator[tuple[str, float | None]]:
    for kind, error_type in (("corrected", 0), ("uncorrected", 1)):
        yield f"ecc_{kind}", gpu.ask("TotalEccErrors", error_type, 0)
        yield f"ecc_{kind}_aggregate", gpu.ask("TotalEccErrors", error_type, 1)
    names = ("remap_correctable", "remap_uncorrectable", "remap_pending", "remap_failure")
    yield from zip(names, gpu.ask("RemappedRows") or (), strict=False)
    for cause, pages in (("single_bit", 0), ("double_bit", 1)):
        retired = gpu.ask("RetiredPages", pages)
        yield f"retired_pages_{cause}", None if retired is None else len(retired)
    for name, policy in (("power", 0), ("thermal", 1)):
        violation = gpu.ask("ViolationStatus", policy)
        yield f"violation_{name}_s", None if violation is None else violation.violationTime / 1e9
    yield "temperature_margin_c", gpu.ask("MarginTemperature")
    yield "temperature_slowdown_c", gpu.ask("TemperatureThreshold", 1)
    limit_mw = gpu.ask("EnforcedPowerLimit")
    yield "power_limit_w", None if limit_mw is None else limit_mw / 1000
    yield "clock_sm_mhz", gpu.ask("ClockInfo", 1)
    yield "clock_sm_max_mhz", gpu.ask("MaxClockInfo", 1)
    yield "pcie_gen", gpu.ask("CurrPcieLinkGeneration")
    yield "pcie_gen_max", gpu.ask("MaxPcieLinkGeneration")
    yield "pcie_width", gpu.ask("CurrPcieLinkWidth")
    yield "pcie_width_max", gpu.ask("MaxPcieLinkWidth")
    yield "pcie_replays", gpu.ask("PcieReplayCounter")
    states = [(link, state) for link in range(MAX_NVLINKS) if (state := gpu.ask("NvLinkState", link)) is not None]
    if states:
        yield "nvlinks", len(states)
        yield "nvlinks_up", sum(1 for _link, state in states if state)
        counts = [gpu.ask("NvLinkErrorCounter", link, kind) for link, _state in states for kind in range(3)]
        told = [count for count in counts if count is not None]
        yield "nvlink_errors", sum(told) if told else None
    yield "recovery_action", _recovery_action(gpu)


def _recovery_action(gpu: _Gpu) -> int | None:
    values = gpu.ask("FieldValues", [RECOVERY_ACTION]) or ()  # type: ignore[arg-type]
    return next((int(value.value.uiVal) for value in values if value.nvmlReturn == 0), None)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


_SIMULATED = ENVIRONMENT in os.environ
_saying = threading.Lock()


def _say(answer: GpuAnswer) -> None:
    line = msgspec.json.encode(msgspec.structs.replace(answer, simulated=_SIMULATED)) + b"\n"
    with _saying:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def _watch_xids(nvml: Any, names: Names) -> None:
    """Says each Xid when the driver tells it. A GPU that has no such events is not listened to."""
    try:
        events = nvml.nvmlEventSetCreate()
    except nvml.NVMLError:
        return
    listened = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), XID_EVENTS, events)
            listened += 1
        except nvml.NVMLError:
            continue
    if listened:
        threading.Thread(target=_pass_on, args=(nvml, events, names), name="xids", daemon=True).start()


def _pass_on(nvml: Any, events: Any, names: Names) -> None:
    while True:
        try:
            event = nvml.nvmlEventSetWait_v2(events, 10_000)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                time.sleep(1)  # a lost GPU can make every wait fail at once
            continue
        try:
            index = nvml.nvmlDeviceGetIndex(event.device)
            uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError:  # it may be lost by now; then the handle tells which it was
            index = _index_of(nvml, event.device, len(names))
            uuid = names.get(index, ("", ""))[0]
        code = int(event.eventData)
        recovery = _recovery_action(_Gpu(nvml, event.device)) if code == RECOVERY_CHANGED else None
        _say(GpuAnswer(xids=(XidSeen(index, uuid, code, time.time(), _SIMULATED, recovery=recovery),)))


def _index_of(nvml: Any, device: Any, count: int) -> int:
    address = ctypes.cast(device, ctypes.c_void_p).value
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:
            continue
        if ctypes.cast(handle, ctypes.c_void_p).value == address:
            return index
    return -1


def main() -> int:
    os.nice(5)
    try:
        import pynvml
    except ImportError:
        _say(GpuAnswer(note="no GPUs (the nvidia-ml-py package is not installed)", final=True))
        return 0
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        missing = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        words = "NVML not found" if error.value == missing else str(error)
        _say(GpuAnswer(note=f"no GPUs ({words})", final=True))
        return 0
    if count == 0:
        _say(GpuAnswer(note="no GPUs (NVML lists none)", final=True))
        return 0
    names: Names = {}
    first = read_all(pynvml, names)
    _watch_xids(pynvml, names)
    _say(first)
    for _line in sys.stdin.buffer:
        try:
            answer = read_all(pynvml, names)
        except pynvml.NVMLError as error:
            answer = GpuAnswer(note=f"NVML: {error}")
        _say(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
